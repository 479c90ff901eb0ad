"""The parameters, and the MACs for one sample, that gates add to a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import GraphModule

from fractrain_fx.config import FracConfig
from fractrain_fx.nn.gates import Controller
from fractrain_fx.passes.graph.edit import NAMESPACE, identifier
from fractrain_fx.passes.graph.facts import blocks_of
from fractrain_fx.passes.rewrite.gates import block_embedding

__all__ = ["GateSize", "controller_size", "gate_sizes"]


@dataclass(frozen=True)
class GateSize:
    """Size of one block's gate, or of the controller.

    Attributes:
        parameters: number of its parameters. Those of the controller, which all blocks share, count for no block.
        macs: multiply-accumulates for one sample. A block's gate includes the controller's step for that block.
            Averaging a block's entry takes none.
    """

    parameters: int
    macs: int


def controller_size(config: FracConfig) -> GateSize:
    """The parameters of the controller, which all blocks share, and the MACs of one step."""
    with torch.device("meta"):
        return _size(Controller(config.gate, len(config.gate_options)))


def gate_sizes(graph_module: GraphModule, config: FracConfig) -> dict[str, GateSize]:
    """The gate of each gated block, by the block's name, in a graph that has its gates or in one that will get them."""
    nodes = {node.name: node for node in graph_module.graph.nodes}
    step = controller_size(config).macs
    sizes: dict[str, GateSize] = {}
    for block in blocks_of(graph_module.graph):
        if block.gated:
            embedding = _inserted(graph_module, block.name)
            if embedding is None:
                with torch.device("meta"):
                    embedding = block_embedding(graph_module, block, nodes[block.entry], config)
            size = _size(embedding)
            sizes[block.name] = GateSize(size.parameters, size.macs + step)
    return sizes


def _inserted(graph_module: GraphModule, block: str) -> nn.Module | None:
    try:
        return graph_module.get_submodule(f"{NAMESPACE}.gates.{identifier(block)}")
    except AttributeError:
        return None


def _size(module: nn.Module) -> GateSize:
    """Every weight of a gate multiplies once for a sample, so its MACs are the sizes of its matrices."""
    parameters = list(module.parameters())
    return GateSize(sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.ndim > 1))
