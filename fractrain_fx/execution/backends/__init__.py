"""The ways to compute a quantized product, each in one file that shows a whole product."""
