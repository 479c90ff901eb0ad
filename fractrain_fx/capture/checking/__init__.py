"""Check that a recorded graph equals its model: at the recorded sizes, at others, and by guards at each call."""
