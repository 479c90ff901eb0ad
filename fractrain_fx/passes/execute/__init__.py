"""Passes that turn a copy of the shown graph into the graph that runs."""
