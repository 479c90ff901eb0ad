"""Memory that is used again by every op, for rounded copies that live only while they are multiplied.

What was last made of a tensor stays for the next op that reads the same one (queries, keys and values).
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from fractrain_fx.formats.bits import dense, readable, work_dtype

__all__ = ["Latest", "scratch", "scratch_holds"]

# Elements; what is larger gets memory of its own, so that no process keeps hold of much.
_LARGEST = 1 << 24

# Shapes that one piece of memory is remembered in: more come only where no two batches are of one size.
_SHAPES = 512


class Latest(threading.local):
    """One result with the tensor it was made of, for as long as that is there and was not written into.

    In eager mode on a CPU, and for each thread its own; elsewhere nothing is kept.
    """

    def __init__(self) -> None:
        self._made: tuple[weakref.ref[Tensor], int, Any, Any] | None = None

    def keep(self, x: Tensor, how: Any, result: Any) -> None:
        """Keep what was made of ``x``, and how, in place of anything kept before."""
        self._made = (weakref.ref(x), x._version, how, result) if _watched(x) else None

    def of(self, x: Tensor, how: Any) -> Any:
        """What was made of ``x`` in that way, or ``None``."""
        if self._made is None or not _watched(x):
            return None
        source, version, made_how, result = self._made
        return result if source() is x and version == x._version and made_how == how else None

    def drop(self) -> None:
        """Keep nothing any more."""
        self._made = None


def _watched(x: Tensor) -> bool:
    """Whether its version tells of writes: not in inference mode."""
    return readable(x) and not x.is_inference()


class _Piece:
    """One piece of memory, and how it was last given out in each shape."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0)
        self.views: dict[tuple[Any, ...], Tensor | None] = {}

    def view(self, like: Tensor, matrices: bool) -> Tensor | None:
        size, contiguous = like.numel(), like.is_contiguous()
        if not 0 < size <= _LARGEST or not (contiguous or matrices or dense(like)):
            return None
        if self.buffer.numel() < size:
            self.views.clear()
            self.buffer = torch.empty(size, dtype=work_dtype(like))
        if contiguous or not matrices:
            return self.buffer.as_strided(like.shape, like.stride())
        upright = like.ndim < 2 or like.stride(-1) <= like.stride(-2)
        flat = self.buffer[:size]
        return flat.view(like.shape) if upright else flat.view(like.mT.shape).mT


class _Kept(threading.local):
    """The memory of one thread."""

    def __init__(self) -> None:
        self.pieces: defaultdict[tuple[int, bool], _Piece] = defaultdict(_Piece)
        self.holds: defaultdict[int, Latest] = defaultdict(Latest)


_kept = _Kept()


def scratch(like: Tensor, slot: int, *, matrices: bool = False) -> Tensor | None:
    """Uninitialised memory of the shape of ``like``, in float32 or wider; ``None`` where none is kept.

    Fresh memory costs a CPU more than all passes of a rounding over it. The content lasts until the next call with the
    same ``slot`` in this thread, so that it must never be saved or returned to a caller. Devices with an allocator that
    keeps memory, and compiled graphs, which plan theirs, need none.

    Args:
        like: the values that will lie there.
        slot: which of the kept pieces of memory.
        matrices: one matrix of the last two dimensions behind the other, as a product wants them; otherwise the order
            of dimensions in memory is that of ``like``.
    """
    if not readable(like):
        return None
    _kept.holds[slot].drop()
    piece = _kept.pieces[slot, like.dtype == torch.float64]
    shape = like.shape, like.stride(), matrices
    try:
        return piece.views[shape]
    except KeyError:
        if len(piece.views) >= _SHAPES:
            piece.views.clear()
        # Whatever the mode of the first call, as memory of inference mode can be written in no other one.
        with torch.inference_mode(False), torch.no_grad():
            found = piece.views[shape] = piece.view(like, matrices)
        return found


def scratch_holds(slot: int) -> Latest:
    """What lies in a piece of that memory, where someone said so; forgotten as soon as it is given out again."""
    return _kept.holds[slot]
