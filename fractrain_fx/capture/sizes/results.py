"""Sizes of a call's results: dimensions whose length depends on data, as after ``nonzero``; the number of parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import Tensor

from fractrain_fx.capture import targets
from fractrain_fx.capture.trees import ValueList, has_mask

__all__ = ["ALL", "decided_dims", "deciding", "part_count", "passed_on"]

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
    A dimension whose length equals, even by chance, one that depends on data counts as dependent too. ``operands`` are
    the tensors that the call was given, each with its dimensions that depend on data.
    """
    operands = list(operands)
    if name.strip("_") in _KEEP_FORM:
        return frozenset(operands[0][1])
    decided = {x.shape[dim] for x, dims in operands for dim in dims if dim < x.ndim}
    free = {size for x, dims in operands for dim, size in enumerate(x.shape) if dim not in dims}
    return frozenset(d for d, size in enumerate(result.shape) if size in decided or (size not in free and size != 1))


_Counted = tuple[Tensor, int, Callable[..., int], tuple[Any, ...]]


def parts_of(size: int, part: int) -> int:
    """The number of parts of at most ``part`` rows each."""
    return max(-(-size // part), 1)


def chunks_of(size: int, wanted: int) -> int:
    """The number of equal parts, at most ``wanted``."""
    return max(-(-size // max(-(-size // wanted), 1)), 1) if size else wanted


def rows_of(size: int) -> int:
    """One part for each row."""
    return size


_SPLITS = frozenset({"split", "unsafe_split", "split_with_sizes"})
_CHUNKS = frozenset({"chunk", "unsafe_chunk"})
_UNBINDS = frozenset({"unbind", "__iter__"})
_KEYWORDS = ("split_size_or_sections", "split_size", "chunks")


def part_count(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Counted | None:
    """The number of parts as a function of a size; ``None`` for other calls, and if the caller gives all part sizes.

    Returns:
        The tensor, the dimension that is cut, the function that counts, and its operands after the size of that
        dimension.
    """
    if not (args and isinstance(args[0], Tensor)):
        return None
    if name in _UNBINDS:
        return args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0), rows_of, ()
    if name not in _SPLITS and name not in _CHUNKS:
        return None
    given = args[1] if len(args) > 1 else next((kwargs[key] for key in _KEYWORDS if key in kwargs), None)
    if not isinstance(given, int):
        return None
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    return args[0], dim, chunks_of if name in _CHUNKS else parts_of, (given,)
