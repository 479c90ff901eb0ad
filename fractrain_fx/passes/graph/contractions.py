"""Recognize contractions, their two factors, and their MACs (closed forms)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from fractrain_fx.capture.targets import call_name, is_product
from fractrain_fx.passes.graph import formulas
from fractrain_fx.passes.graph.facts import facts
from fractrain_fx.passes.graph.formulas import Shape

__all__ = [
    "OPAQUE_KINDS",
    "UNSPLIT_KINDS",
    "Contraction",
    "contraction",
    "factors_of",
    "function_name",
    "operand",
    "other_numbers",
    "set_operand",
    "uncounted_kind",
    "unsplit",
]

# Kinds of modules that multiply inside, where no pass can look.
OPAQUE_KINDS = ("opaque", "rnn")


@dataclass(frozen=True)
class Contraction:
    """One family of ops that multiply two tensors; ``kind`` is its usual name.

    ``operands`` has (position, keyword) of the two tensors, activation-like first. ``channel`` is the dimension of the
    second operand that indexes output channels, when it is a weight; ``first_channel`` is that of the first operand.
    ``macs`` takes the shapes of both operands and of the output.
    """

    kind: str
    operands: tuple[tuple[int, str], tuple[int, str]]
    channel: int
    macs: Callable[[Shape, Shape, Shape], int]
    first_channel: int = -2


_FIRST_TWO = ((0, "input"), (1, "weight"))
_CONV = Contraction("conv", _FIRST_TWO, 0, formulas.convolution)
_CONV_TRANSPOSE = Contraction("conv_transpose", _FIRST_TWO, 1, formulas.transposed_convolution)


def _product(
    kind: str,
    first: int = 0,
    names: tuple[str, str] = ("input", "other"),
    macs: Callable[[Shape, Shape, Shape], int] = formulas.per_output,
) -> Contraction:
    return Contraction(kind, ((first, names[0]), (first + 1, names[1])), -1, macs)


_GROUPED = _product("grouped_mm", names=("mat_a", "mat_b"), macs=formulas.grouped)
_OUTER = _product("outer", names=("input", "vec2"), macs=formulas.outer)
_FAMILIES = {
    "linear": Contraction("linear", _FIRST_TWO, 0, formulas.per_output),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _CONV),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _CONV_TRANSPOSE),
    "conv_tbc": Contraction("conv_tbc", _FIRST_TWO, 2, formulas.temporal_convolution),
    **dict.fromkeys(("matmul", "__matmul__"), _product("matmul")),
    "__rmatmul__": Contraction("matmul", ((1, "other"), (0, "input")), -1, formulas.per_output),
    "bmm": _product("bmm", names=("input", "mat2")),
    "mm": _product("mm", names=("input", "mat2")),
    "addmm": _product("addmm", 1, ("mat1", "mat2")),
    **dict.fromkeys(("_grouped_mm", "grouped_mm"), _GROUPED),
    "baddbmm": _product("baddbmm", 1, ("batch1", "batch2")),
    "addbmm": _product("addbmm", 1, ("batch1", "batch2"), formulas.batch_sum),
    "mv": _product("mv", names=("input", "vec")),
    "addmv": _product("addmv", 1, ("mat", "vec")),
    "dot": _product("dot", names=("input", "tensor")),
    "vdot": _product("dot", names=("input", "other")),
    "inner": Contraction("inner", ((0, "input"), (1, "other")), 0, formulas.per_output, first_channel=0),
    **dict.fromkeys(("outer", "ger"), _OUTER),
    "addr": _product("outer", 1, ("vec1", "vec2"), formulas.outer),
    "tensordot": _product("tensordot", names=("a", "b"), macs=formulas.tensordot),
}

# Calls that multiply more than two tensors, or transform them before: counted, and left in float.
_UNSPLIT: dict[str, Callable[[Sequence[Shape], Shape], int]] = {
    "scaled_dot_product_attention": formulas.attention,
    "bilinear": formulas.bilinear,
    "deform_conv2d": formulas.deformable_convolution,
}
_MEASURED = frozenset({"einsum", "chain_matmul", "multi_dot", "linalg_multi_dot"})
UNSPLIT_KINDS = (*_UNSPLIT, *(f"{name} of several" for name in sorted(_MEASURED)))

# The code that torch's own calls come from: names of other functions, such as ``update_attention``, tell nothing.
_TORCH = ("torch", "_operator", "fractrain_fx")


def function_name(node: Node) -> str:
    """The plain name of what a node calls, whether function or method; an operator's default overload has its name."""
    if node.op == "call_method":
        return str(node.target)
    return call_name(node.target) if node.op == "call_function" else ""


def operand(node: Node, place: tuple[int, str]) -> Any:
    """The argument of a node at a position, however it was passed."""
    position, keyword = place
    return node.args[position] if position < len(node.args) else node.kwargs.get(keyword)


def factors_of(node: Node) -> tuple[Node, Node] | None:
    """Both factors of a contraction or of a fused op; ``None`` for other nodes."""
    if facts(node).role == "fused":
        first, second = node.kwargs["a"], node.kwargs["b"]
    elif (family := contraction(node)) is not None:
        first, second = (operand(node, place) for place in family.operands)
    else:
        return None
    assert isinstance(first, Node) and isinstance(second, Node)
    return first, second


def set_operand(node: Node, place: tuple[int, str], value: Node) -> None:
    """Put another node where ``operand`` reads."""
    position, keyword = place
    if position < len(node.args):
        node.update_arg(position, value)
    else:
        node.update_kwarg(keyword, value)


def contraction(node: Node) -> Contraction | None:
    """The family of the contraction at a node; ``None`` if the node is not a contraction, or is uncounted."""
    name = function_name(node)
    if name == "einsum":
        return _einsum(node)
    family = _FAMILIES.get(name)
    if family is None or not all(isinstance(operand(node, place), Node) for place in family.operands):
        return None
    return family


def _einsum(node: Node) -> Contraction | None:
    # Lists of operands and of letters (``einsum(a, [0, 1], b, [1, 2])``) reach a recording as equation and operands.
    equation, *operands = node.args
    if len(operands) != 2 or not isinstance(equation, str) or not all(isinstance(factor, Node) for factor in operands):
        return None
    terms, output = formulas.einsum_terms(equation)
    channels = [_own_index(terms[side], terms[1 - side], output) for side in (0, 1)]
    places = ((1, ""), (2, ""))
    return Contraction("einsum", places, channels[1], formulas.einsum(equation), first_channel=channels[0])


def _own_index(term: str, other: str, output: str) -> int:
    """The last dimension of an operand that the output has from it alone; without such a dimension, its last."""
    named = term.replace("...", "")
    letters = [letter for letter in named if letter in output and letter not in other]
    if not letters:
        return -1
    # Counted from the end of the term that no "..." separates it from.
    place = named.index(letters[-1])
    return place if "..." not in term or place < term.find("...") else place - len(named)


def other_numbers(node: Node) -> str | None:
    """The kind of numbers that an operand has if they are not real ones, which no format rounds; ``None`` if real.

    A layer of width 0, as a bottleneck of few channels makes, has no numbers at all.
    """
    family = contraction(node)
    operands = [facts(operand(node, place)) for place in family.operands] if family else []
    if any(0 in (record.shape or ()) for record in (*operands, facts(node))):
        return "no numbers, one of its sizes is 0"
    dtypes = [record.dtype for record in operands]
    if any(dtype is not None and dtype.is_complex for dtype in dtypes):
        return "complex"
    return "integers" if any(dtype is not None and not dtype.is_floating_point for dtype in dtypes) else None


def unsplit(node: Node) -> tuple[str, int] | None:
    """Kind and MACs of a call that is counted but has no two operands to quantize; ``None`` for other nodes."""
    name = function_name(node)
    shape = facts(node).shape
    if shape is None:
        return None
    if name in _UNSPLIT:
        places = [*node.args, *node.kwargs.values()][:3]
        shapes = [facts(argument).shape for argument in places if isinstance(argument, Node)]
        if len(shapes) < 3 or any(sizes is None for sizes in shapes):
            return None
        return name, _UNSPLIT[name]([sizes or () for sizes in shapes], shape)
    if name in _MEASURED and contraction(node) is None and sum(facts(x).tensors for x in node.all_input_nodes) > 1:
        macs = formulas.counted_by_torch(node)
        return None if macs is None else (f"{name} of several", macs)
    return None


def uncounted_kind(node: Node, owner: nn.Module | None) -> str | None:
    """The kind of a node that multiplies tensors in a way no formula here counts, or ``None``.

    ``owner`` is the module of a ``call_module`` node. A module that multiplies by matrices of its own is ``opaque``,
    or ``rnn`` for torch's recurrent layers. Calls are known by name. Their cost depends on more than shapes, is not a
    number of MACs, or is at a precision of its own, or their arguments have no form here.
    """
    if owner is not None:
        if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
            return None
        matrices = any(parameter.ndim >= 2 for parameter in owner.parameters())
        if not matrices or _is_lookup_or_norm(owner):
            return None
        if any(isinstance(module, torch.jit.ScriptModule) for module in owner.modules()):
            return "TorchScript"  # it takes no other weights than its own
        return "rnn" if isinstance(owner, nn.RNNBase | nn.RNNCellBase) else "opaque"
    name = function_name(node)
    if name in _UNSPLIT or (name in _MEASURED and contraction(node) is None and len(node.all_input_nodes) > 1):
        return name
    by_torch = node.op == "call_method" or str(getattr(node.target, "__module__", "torch")).startswith(_TORCH)
    return name if by_torch and is_product(name) and facts(node).tensors else None


def _is_lookup_or_norm(owner: nn.Module) -> bool:
    """Whether the matrices of a module are looked up or scale elementwise, instead of being multiplied."""
    names = {cls.__name__.lower() for cls in type(owner).__mro__}
    return any("norm" in name or "embedding" in name for name in names) and not any(
        isinstance(module, nn.Linear | nn.modules.conv._ConvNd | nn.RNNBase) for module in owner.modules()
    )
