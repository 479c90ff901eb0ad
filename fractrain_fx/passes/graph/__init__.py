"""What passes share: what is known of a node, questions to a graph, and the ways to change it."""

from fractrain_fx.passes.graph.edit import NAMESPACE, insert_module

__all__ = ["NAMESPACE", "insert_module"]
