"""Blocks that run for the samples that do not skip them, and other modules in place of the model's own."""
