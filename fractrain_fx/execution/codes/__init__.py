"""Fused ops on integer codes: which ops have codes, their products, and the timing that chooses codes or floats."""
