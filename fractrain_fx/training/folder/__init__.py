"""The folder of a run on disk: which process writes to it, and its checkpoints."""
