"""Modules of the copy that runs: fused ops, and the ways in which they multiply."""
