"""The original model with rounded weights, whose layers and attention round their inputs."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fractrain_fx.errors import ExportError
from fractrain_fx.export.factors import FrozenFactor, FrozenOp
from fractrain_fx.nn.attention import attention_probabilities, repeat_heads
from fractrain_fx.passes import facts

__all__ = [
    "Attention",
    "attention_names",
    "attentions",
    "layers",
    "linear_layers",
    "require_all_blocks",
    "require_linear",
    "rounded_linear_layers",
    "with_rounded_layers",
]

_INPUT, _ATTENTION = "input_rounding", "attention_rounding"

# The layers that do nothing but multiply their input by their weight. A subclass with a forward of its own may do more.
_LAYERS: tuple[Callable[..., Any], ...] = (
    *(nn.Linear.forward, nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward),
    *(nn.ConvTranspose1d.forward, nn.ConvTranspose2d.forward, nn.ConvTranspose3d.forward),
)
_OTHERS = {"transformers.pytorch_utils.Conv1D"}

Attention = Mapping[str, tuple[FrozenOp, FrozenOp]]
"""By the path of a module, the two products of its attention."""


def layers(original: nn.Module, ops: Sequence[FrozenOp]) -> dict[str, FrozenOp]:
    """By path, the layers that are one product of their input and their weight, each with that product.

    A layer that is called several times is left out unless it rounds the same way each time.
    """
    called: dict[str, list[FrozenOp]] = defaultdict(list)
    for op in ops:
        weight = op.weight
        if weight is not None:
            called[str(weight.parameter).rpartition(".")[0]].append(op)
    return {path: products[0] for path, products in called.items() if _is_layer(original, path, products)}


def _is_layer(original: nn.Module, path: str, ops: Sequence[FrozenOp]) -> bool:
    module = original.get_submodule(path)
    first, *others = ops
    weight, activation = first.weight, first.activation
    if weight is None or activation is None or first.op.module != path or str(weight.parameter) != f"{path}.weight":
        return False
    kind = type(module)
    plain = kind.forward in _LAYERS or _name(kind) in _OTHERS
    if not plain or getattr(module, "padding_mode", "zeros") != "zeros":
        return False
    return all(_alike(first, other) for other in others)


def _name(kind: type[nn.Module]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _alike(one: FrozenOp, other: FrozenOp) -> bool:
    pairs = zip(one.factors, other.factors, strict=True)
    return all((a.quantizer, a.bits, a.of) == (b.quantizer, b.bits, b.of) for a, b in pairs)


def attentions(ops: Sequence[FrozenOp]) -> Attention:
    """The modules with one scaled dot-product attention, whose two products are rounded."""
    by_node = {op.node: op for op in ops}
    by_source = {op.factors[0].source: op for op in ops}
    by_module: dict[str, list[tuple[FrozenOp, FrozenOp]]] = defaultdict(list)
    for op in ops:
        for node in _behind(op.node):
            if node.target is attention_probabilities and node in by_source:
                by_module[op.op.module].append((by_node[op.node], by_source[node]))
    return {path: pairs[0] for path, pairs in by_module.items() if path and len(pairs) == 1}


def attention_names(attention: Attention) -> list[str]:
    """The names of the products, sorted."""
    return sorted(op.name for pair in attention.values() for op in pair)


def linear_layers(original: nn.Module, ops: Sequence[FrozenOp]) -> dict[str, FrozenOp]:
    """Of :func:`layers`, those of class ``nn.Linear``."""
    pairs = layers(original, ops).items()
    return {path: op for path, op in pairs if isinstance(original.get_submodule(path), nn.Linear)}


def rounded_linear_layers(original: nn.Module, ops: Sequence[FrozenOp]) -> dict[str, FrozenOp]:
    """Of :func:`linear_layers`, those with a rounded weight."""
    pairs = linear_layers(original, ops).items()
    return {path: op for path, op in pairs if op.weight is not None and op.weight.is_rounded}


def require_all_blocks(skipped: Collection[str], why: str) -> None:
    """Check that no block is skipped by every sample, because a library has only the original's code.

    Args:
        skipped: the blocks that are.
        why: the reason that the library cannot leave them out.

    Raises:
        ExportError: there is one.
    """
    if skipped:
        raise ExportError(
            f"every sample skips block {min(skipped)!r}, and {why}: give the number of another option in "
            "choices={...}, stage='8/8', or export format='onnx'"
        )


def require_linear(original: nn.Module, ops: Sequence[FrozenOp], linear: Mapping[str, FrozenOp], lacks: str) -> None:
    """Check that a library which multiplies linear layers only can hold every rounded product.

    Args:
        original: the model.
        ops: its products.
        linear: those that are linear layers, by path; attention may stay float.
        lacks: what the library lacks, with the way out; ``{name}`` is the op's.

    Raises:
        ExportError: it cannot.
    """
    named = {*(op.name for op in linear.values()), *attention_names(attentions(ops))}
    for op in ops:
        if op.name not in named and any(factor.is_rounded for factor in op.factors):
            owner = type(original.get_submodule(op.op.module)).__name__
            raise ExportError(
                f"{op.name} is not an nn.Linear that multiplies its input by its weight (it is a product in {owner}), "
                f"and {lacks.format(name=op.name)}"
            )


def _behind(node: Node) -> list[Node]:
    """The nodes that read a product's values."""
    users = list(node.users)
    return [after for user in users for after in (list(user.users) if facts(user).role == "gradient" else [user])]


@torch.no_grad()
def with_rounded_layers(original: nn.Module, found: Mapping[str, FrozenOp], attention: Attention) -> nn.Module:
    """A copy of a model that computes as evaluation does in the given layers and attentions."""
    copied = copy.deepcopy(original).eval().requires_grad_(False)
    parameters = _unshared(copied, [op.weight for op in found.values()])
    for path, op in found.items():
        weight, activation = op.weight, op.activation
        assert weight is not None and activation is not None
        layer = copied.get_submodule(path)
        layer.register_parameter("weight", parameters[str(weight.parameter)])
        if activation.is_rounded:
            layer.register_module(_INPUT, activation.rounding())
            # GPT-2's layers multiply a matrix of all positions, along whose dimensions blocks of values lie.
            layer.register_forward_pre_hook(_RoundInput(_name(type(layer)) in _OTHERS), with_kwargs=True)
    for path, (scores, values) in attention.items():
        module = copied.get_submodule(path)
        module.register_module(_ATTENTION, _AttentionRounding((*scores.factors, *values.factors)))
        hooks = _RoundAttention()
        module.register_forward_pre_hook(hooks.enter)
        module.register_forward_hook(hooks.leave, always_call=True)
    return copied


def _unshared(model: nn.Module, weights: Sequence[FrozenFactor | None]) -> dict[str, nn.Parameter]:
    """Parameters of their own with the rounded values: an embedding that is tied to a layer stays float."""
    copies = {}
    for weight in weights:
        assert weight is not None
        parameter = attrgetter(str(weight.parameter))(model)
        copies[str(weight.parameter)] = nn.Parameter(weight.rounded_weight().to(parameter.dtype), requires_grad=False)
    return copies


class _RoundInput:
    """A hook that rounds the input of a layer.

    Args:
        rows: round it as the matrix of its rows.
    """

    def __init__(self, rows: bool) -> None:
        self._rows = rows

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (self._rounded(layer, args[0]), *args[1:]), kwargs
        (name, x), *others = kwargs.items()
        return args, {name: self._rounded(layer, x), **dict(others)}

    def _rounded(self, layer: nn.Module, x: Tensor) -> Tensor:
        rounding = layer.get_submodule(_INPUT)
        rounded: Tensor = rounding(x.reshape(-1, x.shape[-1])).view(x.shape) if self._rows else rounding(x)
        return rounded


class _AttentionRounding(nn.Module):
    """The roundings of queries, transposed keys, probabilities and values; ``None`` for those that stay float."""

    def __init__(self, factors: Sequence[FrozenFactor]) -> None:
        super().__init__()
        for name, factor in zip(("query", "key", "probabilities", "value"), factors, strict=True):
            self.register_module(name, factor.rounding() if factor.is_rounded else None)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Scaled dot-product attention as :class:`fractrain_fx.passes.rewrite.attention.OpenAttention` opens it."""
        if enable_gqa:
            key, value = repeat_heads(key, query), repeat_heads(value, query)
        scores = torch.matmul(_rounded(self.query, query), _rounded(self.key, key.transpose(-2, -1)))
        probabilities = attention_probabilities(scores, query, attn_mask, dropout_p, is_causal, scale)
        return torch.matmul(_rounded(self.probabilities, probabilities), _rounded(self.value, value))


def _rounded(rounding: Any, x: Tensor) -> Tensor:
    rounded: Tensor = x if rounding is None else rounding(x)
    return rounded


class _Within(TorchFunctionMode):
    """Computes the attention that a module calls by other means."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self._attention = attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        compute = self._attention if func is F.scaled_dot_product_attention else func
        return compute(*args, **(kwargs or {}))


class _RoundAttention:
    """Two hooks around a module with an attention."""

    def __init__(self) -> None:
        self._running: list[_Within] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        """Before the module's forward."""
        mode = _Within(module.get_submodule(_ATTENTION))
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._running.append(mode)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """After it, also if it raised."""
        self._running.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]
