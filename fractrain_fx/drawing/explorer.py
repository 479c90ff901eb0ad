"""A picture as JSON files for Google's Model Explorer.

The graph goes into one file (a ``GraphCollection``). MACs and bits go into a file of node data each, which Model
Explorer lays over the graph: `graph_builder.py and node_data_builder.py <https://github.com/google-ai-edge/model-explorer>`_.
"""

from __future__ import annotations

from typing import Any

from fractrain_fx.drawing.dot import COLOURS
from fractrain_fx.drawing.picture import Picture, Shape

__all__ = ["graph_collection", "node_data"]

_GRAPH = "fractrain"
_GRADIENT = [{"stop": 0, "bgColor": "#ffffff"}, {"stop": 1, "bgColor": "#ff9d3c"}]


def graph_collection(picture: Picture) -> dict[str, Any]:
    """Nodes with attributes and incoming edges. The namespace of a node, which groups layers, is its module path."""
    incoming: dict[str, list[dict[str, str]]] = {shape: [] for shape in picture.shapes}
    for arrow in picture.arrows:
        edges = incoming[arrow.target]
        edges.append(
            {"sourceNodeId": arrow.source, "sourceNodeOutputId": arrow.kind, "targetNodeInputId": str(len(edges))}
        )
    nodes = [
        {
            "id": shape.id,
            "label": shape.title,
            "namespace": _namespace(picture, shape),
            "attrs": [{"key": key, "value": str(value)} for key, value in shape.facts()],
            "incomingEdges": incoming[shape.id],
            "style": _style(shape),
        }
        for shape in picture.shapes.values()
    ]
    groups = {
        _path(block.module): {key: str(value) for key, value in block.facts()} for block in picture.blocks.values()
    }
    graph = {"id": _GRAPH, "nodes": nodes, "groupNodeAttributes": groups}
    return {"label": picture.title, "graphs": [graph]}


def node_data(picture: Picture) -> dict[str, dict[str, Any]]:
    """Node data by name: ``macs``, and ``bits``, the highest forward bits (32: float)."""
    counted = [shape for shape in picture.shapes.values() if shape.kind in ("block", "op")]
    macs = {shape.id: {"value": shape.macs} for shape in counted if shape.macs is not None}
    bits = {shape.id: {"value": shape.forward[1]} for shape in counted if shape.forward is not None}
    return {
        name: {_GRAPH: {"results": results, "gradient": _GRADIENT}}
        for name, results in (("macs", macs), ("bits", bits))
    }


def _style(shape: Shape) -> dict[str, str]:
    """Model Explorer writes in black, so dark shapes keep its default colours."""
    return {} if shape.kind in ("input", "output") else {"backgroundColor": COLOURS[shape.mode or shape.kind]}


def _namespace(picture: Picture, shape: Shape) -> str:
    """The group of a shape: its block, or the module that has the block."""
    if shape.block is None:
        return _path(shape.module.rpartition(".")[0])
    if picture.blocks:
        return _path(shape.block)
    return _path(shape.block.rpartition(".")[0])


def _path(module: str) -> str:
    return module.replace(".", "/")
