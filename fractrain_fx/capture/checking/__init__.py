"""Whether a recorded graph is its model: compared at the recorded sizes and at others, guarded at each call."""
