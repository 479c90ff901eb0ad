"""Which nodes are contractions, what they multiply, and how many MACs that takes (closed forms)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import Node

from fractrain_fx.passes.facts import facts

__all__ = [
    "OPAQUE_KINDS",
    "Contraction",
    "contraction",
    "function_name",
    "operand",
    "recurrent_macs",
    "set_operand",
    "uncounted_kind",
]

Shape = tuple[int, ...]

# Kinds of modules that multiply inside, where no pass can look.
OPAQUE_KINDS = ("opaque", "rnn")


@dataclass(frozen=True)
class Contraction:
    """How one family of ops is called.

    Attributes:
        kind: the field's name of it.
        operands: (position, keyword) of the two tensors that are multiplied, activation-like first.
        channel: dimension of the second operand that indexes output channels, when it is a weight.
        macs: MACs from the shapes of both operands and of the output.
    """

    kind: str
    operands: tuple[tuple[int, str], tuple[int, str]]
    channel: int
    macs: Callable[[Shape, Shape, Shape], int]


def _per_output(a: Shape, b: Shape, out: Shape) -> int:
    """Every output element sums over the last dimension of the first operand."""
    return math.prod(out) * a[-1]


def _convolution(a: Shape, b: Shape, out: Shape) -> int:
    """Every output element sums over one filter (``in_channels / groups`` times the kernel)."""
    return math.prod(out) * math.prod(b[1:])


def _transposed_convolution(a: Shape, b: Shape, out: Shape) -> int:
    """Every input element meets one filter (``out_channels / groups`` times the kernel)."""
    return math.prod(a) * math.prod(b[1:])


_FIRST_TWO = ((0, "input"), (1, "weight"))
_CONV = Contraction("conv", _FIRST_TWO, 0, _convolution)
_CONV_TRANSPOSE = Contraction("conv_transpose", _FIRST_TWO, 1, _transposed_convolution)


def _product(kind: str, first: int = 0, names: tuple[str, str] = ("input", "other")) -> Contraction:
    return Contraction(kind, ((first, names[0]), (first + 1, names[1])), -1, _per_output)


_FAMILIES = {
    "linear": Contraction("linear", _FIRST_TWO, 0, _per_output),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _CONV),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _CONV_TRANSPOSE),
    **dict.fromkeys(("matmul", "__matmul__"), _product("matmul")),
    "__rmatmul__": Contraction("matmul", ((1, "other"), (0, "input")), -1, _per_output),
    "bmm": _product("bmm", names=("input", "mat2")),
    "mm": _product("mm", names=("input", "mat2")),
    "addmm": _product("addmm", 1, ("mat1", "mat2")),
    # Each row meets the matrix of its group (expert).
    **dict.fromkeys(("_grouped_mm", "grouped_mm"), _product("grouped_mm", names=("mat_a", "mat_b"))),
    "baddbmm": _product("baddbmm", 1, ("batch1", "batch2")),
}

# Products whose cost or operands have no closed form here: reported as uncounted, never as nothing.
_UNCOUNTED = frozenset(
    {
        *("addbmm", "addmv", "mv", "dot", "vdot", "inner", "outer", "ger", "tensordot", "chain_matmul", "multi_dot"),
        *("bilinear", "cdist", "kron", "scaled_dot_product_attention", "_scaled_mm"),
        *(
            "scaled_mm",
            "_int_mm",
            "deform_conv2d",
            "fft",
            "rfft",
            "stft",
            "matrix_power",
            "matrix_exp",
            "flex_attention",
        ),
    }
)


def function_name(node: Node) -> str:
    """The plain name of what a node calls, whether function or method."""
    if node.op == "call_method":
        return str(node.target)
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", ""))
    return ""


def operand(node: Node, place: tuple[int, str]) -> Any:
    """The argument of a node at a position, however it was passed."""
    position, keyword = place
    return node.args[position] if position < len(node.args) else node.kwargs.get(keyword)


def set_operand(node: Node, place: tuple[int, str], value: Node) -> None:
    """Put another node where ``operand`` reads."""
    position, keyword = place
    if position < len(node.args):
        node.update_arg(position, value)
    else:
        node.update_kwarg(keyword, value)


def contraction(node: Node) -> Contraction | None:
    """How the contraction at a node is called, or ``None`` where the node is none (or is uncounted)."""
    name = function_name(node)
    if name == "einsum":
        return _einsum(node)
    family = _FAMILIES.get(name)
    if family is None or not all(isinstance(operand(node, place), Node) for place in family.operands):
        return None
    return family


def _einsum(node: Node) -> Contraction | None:
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], Sequence):
        return None
    if len(operands) != 2 or not isinstance(equation, str) or not all(isinstance(each, Node) for each in operands):
        return None
    inputs, _, output = equation.replace(" ", "").partition("->")
    letters = inputs.split(",")
    weight_only = [index for index in letters[1].replace("...", "") if index in output and index not in letters[0]]
    channel = letters[1].replace("...", "").index(weight_only[-1]) if weight_only else -1

    def macs(a: Shape, b: Shape, out: Shape) -> int:
        sizes: dict[str, int] = {}
        for term, shape in zip(letters, (a, b), strict=True):
            named = term.replace("...", "")
            before = term.find("...") if "..." in term else len(named)
            after = len(named) - before
            sizes.update(zip(named[:before], shape[:before], strict=False))
            sizes.update(zip(named[before:], shape[len(shape) - after :], strict=False))
            if "..." in term:
                sizes["..."] = max(sizes.get("...", 1), math.prod(shape[before : len(shape) - after]))
        return math.prod(sizes.values())

    return Contraction("einsum", ((1, ""), (2, "")), channel, macs)


def uncounted_kind(node: Node, owner: nn.Module | None) -> str | None:
    """The kind of a node that multiplies tensors in a way no formula here counts, or ``None``.

    ``owner`` is the module of a ``call_module`` node: one that keeps matrices inside (and is no embedding) is
    ``opaque``, or ``rnn`` for torch's recurrent layers.
    """
    if owner is not None:
        if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
            return None
        matrices = any(parameter.ndim >= 2 for parameter in owner.parameters())
        if not matrices or _is_lookup_or_norm(owner):
            return None
        return "rnn" if isinstance(owner, nn.RNNBase | nn.RNNCellBase) else "opaque"
    name = function_name(node)
    if name == "einsum":
        return "einsum" if len(node.args) > 2 or contraction(node) is None else None
    if name in _UNCOUNTED and facts(node).shape is not None:
        return name
    return None


def recurrent_macs(owner: nn.Module, shape: Shape) -> int:
    """MACs of torch's recurrent layers and cells: every step of every sequence meets each of their matrices once.

    Args:
        owner: an ``nn.RNNBase`` or ``nn.RNNCellBase``.
        shape: of its input, features last.
    """
    matrices = sum(parameter.numel() for parameter in owner.parameters() if parameter.ndim >= 2)
    return math.prod(shape[:-1]) * matrices


def _is_lookup_or_norm(owner: nn.Module) -> bool:
    """Modules whose matrices are looked up or scale elementwise rather than being multiplied."""
    names = {cls.__name__.lower() for cls in type(owner).__mro__}
    return any("norm" in name or "embedding" in name for name in names) and not any(
        isinstance(module, nn.Linear | nn.modules.conv._ConvNd | nn.RNNBase) for module in owner.modules()
    )
