"""Give ReLUs a gradient that compiles well, for the copy of the graph that runs."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.nn import functional as F

from fractrain_fx.execution.blocks.maskless_relu import MasklessReLU, relu
from fractrain_fx.passes.graph.aliases import memory_of, written
from fractrain_fx.passes.graph.edit import NAMESPACE, identifier, insert_module, original_at, owner_module

__all__ = ["ReplaceReLUs"]


class ReplaceReLUs(PassBase):
    """Replace each ReLU by one for which a compiled graph saves no mask (``execution/blocks/maskless_relu.py``).

    An in-place ReLU stays if another node may read the memory that it changes.

    Requires: nothing. Ensures: eager and compiled steps give the same values as before.
    """

    def call(self, graph_module: GraphModule) -> PassResult:
        relus = [node for node in graph_module.graph.nodes if _is_relu(node, graph_module)]
        for node in relus:
            if node.op == "call_module":
                path = f"fused.{identifier(str(node.target))}_relu"
                insert_module(graph_module, path, partial(MasklessReLU, original_at(graph_module, node)))
                node.target = f"{NAMESPACE}.{path}"
            else:
                node.target = relu
        graph_module.graph.lint()
        graph_module.recompile()
        return PassResult(graph_module, bool(relus))


def _is_relu(node: Node, graph_module: GraphModule) -> bool:
    module = owner_module(graph_module, node)
    if type(module) is not nn.ReLU and not (node.op == "call_function" and node.target in (F.relu, torch.relu)):
        return False
    return len(node.all_input_nodes) == 1 and all(
        operand.op not in ("placeholder", "get_attr") and len(operand.users) == 1 and memory_of(operand) == {operand}
        for operand in written(node)
    )
