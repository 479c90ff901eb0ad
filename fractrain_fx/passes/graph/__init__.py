"""Code that passes share: records of nodes, queries of a graph, and edits of it."""

from fractrain_fx.passes.graph.edit import NAMESPACE, insert_module

__all__ = ["NAMESPACE", "insert_module"]
