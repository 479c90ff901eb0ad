"""Find the class that computes and differentiates a contraction of the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import Node

from fractrain_fx.execution.arithmetic import (
    AddMatMul,
    Arithmetic,
    Bound,
    Convolution,
    Einsum,
    GroupedMatMul,
    Linear,
    MatMul,
)
from fractrain_fx.passes.graph.contractions import contraction, function_name, operand
from fractrain_fx.passes.graph.facts import facts

__all__ = ["arithmetic_of"]


def arithmetic_of(node: Node) -> Arithmetic | str:
    """The class that computes and differentiates a contraction, or the reason there is none."""
    kind = _family(node)
    if not isinstance(kind, str) and any(isinstance(value, Node) for value in _flat(kind.bind(node.args, node.kwargs))):
        return "one of its settings is computed at run time"
    return kind


def _flat(bound: Bound) -> Iterator[Any]:
    for setting in bound.static:
        yield from setting if isinstance(setting, tuple) else (setting,)


def _family(node: Node) -> Arithmetic | str:
    name = function_name(node)
    family = contraction(node)
    if family is None:
        return "is not a contraction"
    shapes = [facts(operand(node, place)).shape or () for place in family.operands]
    if family.kind in ("conv", "conv_transpose"):
        return _convolution(node, name, shapes)
    if name == "linear":
        return Linear() if len(shapes[1]) == 2 else "multiplies by a vector"
    if name == "einsum":
        return _einsum(node)
    if family.kind == "grouped_mm":
        return _grouped(node, shapes)
    if min(map(len, shapes)) < 2:
        return "multiplies by a vector"
    known: dict[str, Callable[[], Arithmetic]] = {
        "matmul": MatMul,
        "__matmul__": MatMul,
        "__rmatmul__": lambda: MatMul(swapped=True),
        "bmm": lambda: MatMul(("input", "mat2")),
        "mm": lambda: MatMul(("input", "mat2")),
        "addmm": lambda: AddMatMul(("input", "mat1", "mat2")),
        "baddbmm": lambda: AddMatMul(("input", "batch1", "batch2")),
    }
    return known[name]() if name in known else f"no fused form of {name} is known"


def _convolution(node: Node, name: str, shapes: list[tuple[int, ...]]) -> Arithmetic | str:
    dims = int(name[-2])
    if len(shapes[0]) != dims + 2:
        return "its input has no batch dimension"
    if operand(node, (4, "padding")) == "same" and any(kernel % 2 == 0 for kernel in shapes[1][2:]):
        return "pads its two sides differently"
    return Convolution(shapes[1][2:], "transpose" in name)


def _grouped(node: Node, shapes: list[tuple[int, ...]]) -> Arithmetic | str:
    if [len(shape) for shape in shapes] != [2, 3]:
        return "groups other dimensions than the rows of its first factor"
    settings = (((3, "bias"), "adds a bias to each group"), ((4, "out_dtype"), "sets the type of its result"))
    reasons = [reason for place, reason in settings if operand(node, place) is not None]
    return reasons[0] if reasons else GroupedMatMul()


def _einsum(node: Node) -> Arithmetic | str:
    equation = str(node.args[0]).replace(" ", "")
    factors, arrow, out = equation.partition("->")
    first, second = factors.split(",")
    if not arrow or "." in equation:
        return "its equation leaves dimensions open"
    if any(len(set(term)) < len(term) for term in (first, second, out)):
        return "takes a diagonal"
    if set(first) - set(second + out) or set(second) - set(first + out):
        return "sums an index of one factor alone"
    return Einsum(equation)
