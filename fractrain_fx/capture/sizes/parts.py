"""The number of parts into which a call cuts a tensor, as a function of the cut size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

__all__ = ["part_count"]

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

    Args:
        name: name of the call.
        args: its arguments.
        kwargs: its keyword arguments.

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
