"""Passes that only annotate a graph: shapes, MACs, blocks, precisions, and blocks that can run for some samples."""
