"""Guards of a recorded graph: expressions of sizes that Python code read, and inputs whose values decide what it does.

Such inputs hold sizes, as the grids of images (``image_grid_thw``) do.
"""

from __future__ import annotations

import linecache
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.graph import magic_methods

from fractrain_fx.capture.source import of_models, outward, package_of

__all__ = ["Expression", "Guard", "InputValues", "Place", "Size", "holds_sizes", "place_of"]

# How generated code writes operations on two operands, such as ``{} < {}``.
_WRITTEN = {getattr(operator, name, None): words for name, words in magic_methods.items() if words.count("{}") == 2}
# Packages that models compute with; torch is not part of a model either.
_LIBRARIES = ("numpy", "einops", "functools", "contextlib")

# A grid has two or three sizes, a box four numbers.
_NUMBERS = range(2, 5)

_OPPOSITES = {operator.lt: operator.ge, operator.le: operator.gt, operator.eq: operator.ne}
_OPPOSITES |= {opposite: op for op, opposite in _OPPOSITES.items()}


@dataclass(frozen=True)
class Place:
    """A line of a model's code, counted from 1."""

    file: str
    line: int

    @property
    def line_only(self) -> str:
        """File and line without the code."""
        return f"{self.file}:{self.line}"

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.line).strip()
        return self.line_only + (f" ({code})" if code else "")


@dataclass(frozen=True)
class Size:
    """A number read from the form of a tensor, the size or stride of ``dim``.

    ``read`` is ``"size"`` or ``"stride"``; ``"item"`` for the number that the node gives.
    """

    node: Node
    dim: int
    read: str = "size"

    def __str__(self) -> str:
        return self.node.name if self.read == "item" else f"{self.node.name}.{self.read}({self.dim})"


@dataclass(frozen=True)
class Expression:
    """An operation on sizes and numbers."""

    op: Callable[..., Any]
    operands: tuple[Any, ...]

    def value(self, sizes: Mapping[Size, int]) -> Any:
        """The result for the given sizes."""
        return self.op(*(_value(operand, sizes) for operand in self.operands))

    @property
    def sizes(self) -> frozenset[Size]:
        """The sizes that it reads."""
        read = (
            operand.sizes if isinstance(operand, Expression) else {operand}
            for operand in self.operands
            if _reads(operand)
        )
        return frozenset().union(*read)

    def on(self, nodes: Mapping[Node, Node]) -> Expression:
        """The same expression on the nodes of a copied graph."""

        def moved(operand: Any) -> Any:
            if isinstance(operand, Expression):
                return operand.on(nodes)
            return Size(nodes[operand.node], operand.dim, operand.read) if isinstance(operand, Size) else operand

        return Expression(self.op, tuple(map(moved, self.operands)))

    def __str__(self) -> str:
        parts = [f"({operand})" if _has_sign(operand) else str(operand) for operand in self.operands]
        if self.op is operator.pos:
            return parts[0].removeprefix("(").removesuffix(")") if _has_sign(self.operands[0]) else parts[0]
        if self.op in _WRITTEN:
            return _WRITTEN[self.op].format(*parts)
        return f"{getattr(self.op, '__name__', self.op)}({', '.join(map(str, self.operands))})"


@dataclass(frozen=True)
class Guard:
    """A condition on sizes that Python code read while the graph was recorded.

    The graph equals its model for calls in which ``expression`` has this value. ``module`` is the path of the module
    whose code read it.
    """

    expression: Expression
    value: Any
    module: str
    place: Place

    def holds(self, sizes: Mapping[Size, int]) -> bool:
        """Whether Python would see the same for the given sizes; not if they lack one that the condition reads."""
        try:
            value = self.expression.value(sizes)
        except (ArithmeticError, LookupError, ValueError, TypeError):
            return False
        return type(value) is type(self.value) and bool(value == self.value)

    def __str__(self) -> str:
        expression, value = self.expression, self.value
        if not isinstance(value, bool):
            return f"{expression} == {value}"
        if expression.op is bool:
            return f"{expression.operands[0]} {'!=' if value else '=='} 0"
        if not value and expression.op in _OPPOSITES:
            return str(Expression(_OPPOSITES[expression.op], expression.operands))
        return str(expression) if value else f"not {expression}"


def place_of(frame: FrameType | None) -> Place:
    """The innermost line of the model's own code, which is not in the libraries that it computes with."""
    frames = (outer for outer in outward(frame) if of_models(outer) and package_of(outer) not in _LIBRARIES)
    innermost = next(frames, frame)
    return Place(innermost.f_code.co_filename, innermost.f_lineno) if innermost else Place("?", 0)


def _reads(operand: Any) -> bool:
    return isinstance(operand, (Expression, Size))


def _has_sign(operand: Any) -> bool:
    return isinstance(operand, Expression) and operand.op in _WRITTEN


def _value(operand: Any, sizes: Mapping[Size, int]) -> Any:
    if isinstance(operand, Expression):
        return operand.value(sizes)
    return sizes[operand] if isinstance(operand, Size) else operand


def holds_sizes(value: Any) -> bool:
    """Whether an input looks like a list of sizes: integers of shape ``[items, 2 to 4]``."""
    if not isinstance(value, Tensor) or value.ndim != 2 or value.shape[1] not in _NUMBERS:
        return False
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


@dataclass(frozen=True, eq=False)
class InputValues:
    """A condition on an input: it has the values that it had when the graph was recorded.

    ``index`` is its place among the inputs of the graph; ``place`` is the line that read the values, in ``module``.
    """

    name: str
    index: int
    value: Tensor
    place: Place
    module: str = ""

    def holds(self, given: Any) -> bool:
        """Whether a call's input has the recorded values."""
        return isinstance(given, Tensor) and not given.is_meta and torch.equal(given, self.value.to(given.device))

    def __str__(self) -> str:
        values = self.value.tolist()
        shown = values if len(values) <= 3 else [*values[:3], ...]
        return f"{self.name} == {str(shown).replace('Ellipsis', '...')}"
