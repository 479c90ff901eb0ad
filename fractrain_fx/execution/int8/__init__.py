"""A fused op on integer codes: which ops have any, their products, and the timing that chooses."""
