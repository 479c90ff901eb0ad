"""Tell activations and casts from linear maps: the two sides of a residual block differ in that."""

from __future__ import annotations

from collections.abc import Set

from torch import nn
from torch.fx import GraphModule, Node

from fractrain_fx.passes.graph.contractions import function_name
from fractrain_fx.passes.graph.edit import owner_module

__all__ = ["activates", "is_identity"]

_CASTS = frozenset({"to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "alias"})
_ACTIVATIONS = frozenset(
    {
        *("relu", "relu_", "gelu", "silu", "silu_", "sigmoid", "tanh", "hardswish", "hardsigmoid", "leaky_relu", "elu"),
        *("attention_probabilities", "scaled_dot_product_attention"),
        *("selu", "celu", "relu6", "mish", "softplus", "softmax", "prelu", "glu", "hardtanh"),
    }
)
_POOLS = frozenset(f"{kind}max{_}pool{dims}d" for kind in ("", "adaptive") for _ in ("", "_") for dims in (1, 2, 3))


def activates(graph_module: GraphModule, region: Set[Node], *, pools: bool = False) -> bool:
    """Whether a region has an activation; ``pools``: or picks maxima, which is not linear either."""
    names = _ACTIVATIONS | _POOLS if pools else _ACTIVATIONS
    return any(function_name(node) in names or _inside(owner_module(graph_module, node), names) for node in region)


def is_identity(graph_module: GraphModule, node: Node) -> bool:
    """Whether a node only casts or copies its input."""
    module = owner_module(graph_module, node)
    if module is None:
        return function_name(node) in _CASTS
    return isinstance(module, nn.Identity) or (isinstance(module, nn.Sequential) and not len(module))


def _inside(owner: nn.Module | None, names: frozenset[str]) -> bool:
    return owner is not None and any(
        type(module).__module__.endswith("activation") or type(module).__name__.lower() in names
        for module in owner.modules()
        if not isinstance(module, nn.Identity)
    )
