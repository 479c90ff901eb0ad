"""Memory that is used again by every op, for rounded copies that live only while they are multiplied."""

from __future__ import annotations

import threading
from collections import defaultdict

import torch
from torch import Tensor

from fractrain_fx.formats.bits import dense, readable, work_dtype
from fractrain_fx.formats.latest import Latest

__all__ = ["scratch", "scratch_holds"]

# Elements; what is larger gets memory of its own, so that no process keeps hold of much.
_LARGEST = 1 << 24


class _Kept(threading.local):
    """The memory of one thread."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[int, torch.dtype], Tensor] = {}
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
    size = like.numel()
    contiguous = like.is_contiguous()
    if not readable(like) or not 0 < size <= _LARGEST or not (contiguous or matrices or dense(like)):
        return None
    scratch_holds(slot).drop()
    key = slot, work_dtype(like)
    buffer = _kept.buffers.get(key)
    if buffer is None or buffer.numel() < size:
        buffer = _kept.buffers[key] = torch.empty(size, dtype=key[1])
    if contiguous or not matrices:
        return buffer.as_strided(like.shape, like.stride())
    upright = like.ndim < 2 or like.stride(-1) <= like.stride(-2)
    flat = buffer[:size]
    return flat.view(like.shape) if upright else flat.view(like.mT.shape).mT


def scratch_holds(slot: int) -> Latest:
    """What lies in a piece of that memory, where someone said so; forgotten as soon as it is given out again."""
    return _kept.holds[slot]
