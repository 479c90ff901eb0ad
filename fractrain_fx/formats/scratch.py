"""Memory that all ops share for rounded copies, which live only while they are multiplied."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fractrain_fx.formats.bits import dense, readable, work_dtype

__all__ = ["Latest", "Order", "forget_results", "scratch", "scratch_of"]

Order = Literal["kept", "plain", "matrices", "channels last"]
"""How the values of a copy lie in memory: in the order of the original; contiguous; with the matrices of the last two
dimensions one after the other, as a product reads them; or, for ``(batch, channels, height, width)``, with the channels
innermost."""

# Elements. Larger tensors get fresh memory, so that no process holds on to much.
_LARGEST = 1 << 24

# Views that are kept of one piece of memory, one for each shape. Only batches that all differ in size need more.
_SHAPES = 512


_calls = 0


def forget_results() -> None:
    """Forget what each :class:`Latest` of all threads keeps.

    A call of a model begins with it: an input that changed through ``data``, or between replays of a CUDA graph, shows
    no sign.
    """
    global _calls
    _calls += 1


class Latest(threading.local):
    """One result and the tensor that it was made from; valid while that tensor exists and was not written into.

    Each thread has its own. Results are kept in eager mode only.
    """

    def __init__(self) -> None:
        self._made: tuple[weakref.ref[Tensor], tuple[Any, ...], Any, Any] | None = None

    def keep(self, x: Tensor, how: Any, result: Any) -> None:
        """Keep ``result``, which was made from ``x`` in the way ``how``; forget the one before."""
        self._made = (weakref.ref(x), _moment(x), how, result) if _watched(x) else None

    def of(self, x: Tensor, how: Any) -> Any:
        """The result that was made from ``x`` in the way ``how``, or ``None``."""
        if self._made is None or not _watched(x):
            return None
        source, moment, made_how, result = self._made
        return result if source() is x and moment == _moment(x) and made_how == how else None

    def drop(self) -> None:
        """Forget the result."""
        self._made = None


def _moment(x: Tensor) -> tuple[Any, ...]:
    """The state in which a result was made: another stream of a GPU, for example, would not wait for the result."""
    on_gpu = x.is_cuda and torch.cuda.is_initialized()  # a fake tensor may say so where there is none
    return x._version, _calls, torch.cuda.current_stream(x.device) if on_gpu else None


def _watched(x: Tensor) -> bool:
    """Whether torch counts the writes into ``x``, which it does not in inference mode and in compiled graphs."""
    return not (torch.compiler.is_compiling() or x.is_inference())


class _Piece:
    """One piece of memory, and its view in each shape that was asked for."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0)
        self.views: dict[tuple[Any, ...], Tensor | None] = {}

    def view(self, like: Tensor, order: Order) -> Tensor | None:
        size, contiguous = like.numel(), like.is_contiguous()
        if not 0 < size <= _LARGEST or (order == "kept" and not contiguous and not dense(like)):
            return None
        if self.buffer.numel() < size:
            self.views.clear()
            self.buffer = torch.empty(size, dtype=work_dtype(like))
        flat = self.buffer[:size]
        if order == "channels last":
            return flat.view(like.movedim(1, -1).shape).movedim(-1, 1)
        if contiguous or order == "kept":
            return self.buffer.as_strided(like.shape, like.stride())
        upright = order == "plain" or like.ndim < 2 or like.stride(-1) <= like.stride(-2)
        return flat.view(like.shape) if upright else flat.view(like.mT.shape).mT


class _Kept(threading.local):
    """The memory of one thread."""

    def __init__(self) -> None:
        self.pieces: defaultdict[tuple[int, bool], _Piece] = defaultdict(_Piece)


_kept = _Kept()


def scratch(like: Tensor, slot: int, order: Order = "kept") -> Tensor | None:
    """Uninitialised memory of the shape of ``like``, in float32 or wider; ``None`` if there is none for it.

    Fresh memory costs a CPU more than all passes of a rounding over it. The content lasts until the next call with the
    same ``slot`` in this thread, so it must never be saved or returned to a caller. There is none on devices other than
    a CPU, whose allocators keep memory, nor in compiled graphs, which plan theirs.

    Args:
        like: the tensor to make room for.
        slot: which piece of the thread's memory.
        order: the order of dimensions in memory.
    """
    return _lent(like, slot, order) if readable(like) else None


def scratch_of(shape: Sequence[int], near: Tensor, slot: int) -> Tensor | None:
    """Memory as :func:`scratch` gives it, for a contiguous tensor of the type and on the device of ``near``."""
    return _lent(torch.empty(shape, dtype=near.dtype, device="meta"), slot, "kept") if readable(near) else None


def _lent(like: Tensor, slot: int, order: Order) -> Tensor | None:
    """A view of the thread's memory in the shape of ``like``."""
    piece = _kept.pieces[slot, like.dtype == torch.float64]
    shape = like.shape, like.stride(), order
    try:
        return piece.views[shape]
    except KeyError:
        if len(piece.views) >= _SHAPES:
            piece.views.clear()
        # Outside inference mode even if the first call is in it: a tensor made there can be written nowhere else.
        with torch.inference_mode(False), torch.no_grad():
            view = piece.views[shape] = piece.view(like, order)
        return view
