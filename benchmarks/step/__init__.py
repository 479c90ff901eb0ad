"""The cost of a training step in time and saved memory, as a ratio to the eager float32 step of the same model."""
