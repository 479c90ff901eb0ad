"""What stays one node of a graph: modules, functions and methods that are kept as one call."""
