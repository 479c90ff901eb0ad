"""What a training step costs, in time and in saved memory, as a ratio to the eager float32 step of the same model."""
