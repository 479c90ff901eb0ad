"""Passes that change the graph shown: attention, gates, quantizers, the cost."""
