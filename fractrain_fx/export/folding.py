"""Fold batch norms into the coded weights of the convolutions before them."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from fractrain_fx.execution.arithmetic import Convolution
from fractrain_fx.export.graph import RoundedProduct
from fractrain_fx.passes.graph.contractions import contraction, operand

__all__ = ["fold_batch_norms"]


@torch.no_grad()
def fold_batch_norms(graph_module: GraphModule) -> None:
    """Multiply scales of weights by those of the batch norm behind, which becomes a bias; codes only change sign."""
    for node in list(graph_module.graph.find_nodes(op="call_module")):
        norm = graph_module.get_submodule(str(node.target))
        source: Any = node.args[0] if node.args else None
        if not isinstance(norm, nn.modules.batchnorm._BatchNorm) or norm.running_mean is None:
            continue
        behind = _behind(norm)
        if behind is None:
            continue
        weight = _weight_of(graph_module, source)
        if weight is None:
            continue
        assert norm.running_var is not None
        factor = (norm.running_var + norm.eps).rsqrt()
        if norm.weight is not None:
            factor = factor * norm.weight
        bias: Any = operand(source, (2, "bias"))
        shift = -norm.running_mean if bias is None else attrgetter(str(bias.target))(graph_module) - norm.running_mean
        shift = shift * factor + (0 if norm.bias is None else norm.bias)
        weight.set(weight.coded.times(factor.view([-1] + [1] * (weight.codes.ndim - 1))))
        name = f"folded_{node.name}"
        graph_module.register_buffer(name, shift.float())
        with graph_module.graph.inserting_before(source):
            shifted = graph_module.graph.get_attr(name)
        if len(source.args) > 2:
            source.update_arg(2, shifted)
        else:
            source.update_kwarg("bias", shifted)
        if behind:
            node.target = f"behind_{node.name}"
            graph_module.add_submodule(node.target, behind)
            continue
        node.replace_all_uses_with(source)
        graph_module.graph.erase_node(node)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()


def _behind(norm: Any) -> nn.Sequential | None:
    """The modules that a batch norm calls after its own arithmetic; ``None`` for a class that may do anything."""
    kind = type(norm)
    if kind.forward in (nn.BatchNorm2d.forward, nn.SyncBatchNorm.forward):
        return nn.Sequential()
    if f"{kind.__module__}.{kind.__qualname__}" == "timm.layers.norm_act.BatchNormAct2d":
        return nn.Sequential(norm.drop, norm.act)
    return None


def _weight_of(graph_module: GraphModule, node: Any) -> Any:
    """The coded weight of a convolution that only a batch norm reads."""
    if not isinstance(node, Node) or len(node.users) != 1:
        return None
    weight = _convolved(graph_module, node)
    if weight is None or weight.op != "call_module" or len(weight.users) != 1:
        return None
    module = graph_module.get_submodule(str(weight.target))
    return module if hasattr(module, "coded") else None


def _convolved(graph_module: GraphModule, node: Node) -> Node | None:
    """The weight of a convolution that is not transposed."""
    family = contraction(node)
    if family is not None:
        return operand(node, family.operands[1]) if family.kind == "conv" else None
    module = graph_module.get_submodule(str(node.target)) if node.op == "call_module" else None
    arithmetic = module.arithmetic if isinstance(module, RoundedProduct) else None
    convolves = isinstance(arithmetic, Convolution) and not arithmetic.transposed
    return node.args[1] if convolves else None  # type: ignore[return-value]
