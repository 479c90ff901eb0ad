"""Passes that look: shapes, MACs, blocks, precisions, and what can run for a part of the samples."""
