"""Into how many parts a call cuts a tensor, as a function of the size that it cuts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

__all__ = ["part_count"]

_Counted = tuple[Tensor, int, Callable[..., int], tuple[Any, ...]]


def parts_of(size: int, part: int) -> int:
    """Parts of at most ``part`` rows each."""
    return max(-(-size // part), 1)


def chunks_of(size: int, wanted: int) -> int:
    """Equal parts, at most as many as wanted."""
    return max(-(-size // max(-(-size // wanted), 1)), 1) if size else wanted


def rows_of(size: int) -> int:
    """A part for each row."""
    return size


_SPLITS = frozenset({"split", "unsafe_split", "split_with_sizes"})
_CHUNKS = frozenset({"chunk", "unsafe_chunk"})
_UNBINDS = frozenset({"unbind", "__iter__"})
_KEYWORDS = ("split_size_or_sections", "split_size", "chunks")


def part_count(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Counted | None:
    """How the number of parts follows from a size; ``None`` for other calls, and where the caller names the parts.

    Args:
        name: of the call.
        args: what it was given.
        kwargs: what it was given by name.

    Returns:
        The tensor, the dimension that is cut, and the function that counts: it takes the size of that dimension and
        the operands that follow here.
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
