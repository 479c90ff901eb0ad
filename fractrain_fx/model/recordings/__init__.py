"""The recordings of a rewritten model: which of them a call gets, and whether it equals the model."""
