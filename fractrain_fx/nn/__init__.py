"""Modules that the graph shown to users calls: quantizers, running ranges, gates, the cost meter."""
