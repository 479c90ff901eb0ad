"""Dimensions whose length depends on data, as in the results of ``nonzero``, boolean masks and ``unique``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor

from fractrain_fx.capture import targets
from fractrain_fx.capture.trees import has_mask
from fractrain_fx.capture.values import ValueList

__all__ = ["ALL", "decided_dims", "deciding", "passed_on"]

ALL = frozenset(range(64))
"""Every dimension that a tensor can have."""

_ROWS = frozenset({0})
_FIRST = frozenset({"nonzero", "argwhere", "masked_select", "bincount"})
# Calls whose result has the form of their first operand, whatever rows the others have.
_KEEP_FORM = frozenset(
    {"index_add", "index_copy", "index_put", "index_fill", "index_reduce", "scatter", "scatter_add", "scatter_reduce"}
    | {"masked_fill", "masked_scatter", "copy"}
)


def decided_dims(name: str, args: tuple[Any, ...]) -> frozenset[int]:
    """Dimensions of a call's results whose length depends on values."""
    if name in _FIRST or (name == "where" and len(args) == 1):
        return _ROWS
    if name in ("__getitem__", "getitem") and has_mask(args[1]):
        return _ROWS if isinstance(args[1], Tensor) else ALL
    if name == "repeat_interleave" and len(args) > 1 and isinstance(args[1], Tensor):
        return ALL
    if name in targets.DATA_DEPENDENT or any(isinstance(each, ValueList) for each in args):
        return ALL
    return frozenset()


def deciding(name: str, args: tuple[Any, ...]) -> Any:
    """The arguments of a call that decide the length of such dimensions."""
    if name in ("__getitem__", "getitem", "repeat_interleave") and len(args) > 1:
        return args[1]
    return args


def passed_on(name: str, result: Tensor, operands: Iterable[tuple[Tensor, Collection[int]]]) -> frozenset[int]:
    """Dimensions of a result whose length depends on data, because that of an operand does.

    Lengths are compared: a dimension is free of data if an operand has a dimension of that length that is free of data.
    A dimension whose length equals, even by chance, one that depends on data counts as dependent too.

    Args:
        name: name of the call.
        result: a tensor that it returned.
        operands: the tensors that it was given, each with its dimensions that depend on data.
    """
    operands = list(operands)
    if name.strip("_") in _KEEP_FORM:
        return frozenset(operands[0][1])
    decided = {x.shape[dim] for x, dims in operands for dim in dims if dim < x.ndim}
    free = {size for x, dims in operands for dim, size in enumerate(x.shape) if dim not in dims}
    return frozenset(d for d, size in enumerate(result.shape) if size in decided or (size not in free and size != 1))
