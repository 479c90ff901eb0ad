"""Which tensors the Triton kernels take."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from fractrain_fx.formats.bits import dense
from fractrain_fx.native.choice import has_triton_package

__all__ = ["has_triton", "on_device", "place", "stored"]

_HERE = nullcontext()
_CLASSES = (Tensor, nn.Parameter)
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def has_triton(x: Tensor, *ranges: Tensor) -> bool:
    """Whether the kernels take values with these ends of ranges: in eager mode, on a GPU, in float32 or a half type.

    Compiled graphs fuse the plain operations by themselves. Tensors of other classes (fake ones, shards) may hold no
    values.
    """
    here = x.is_cuda and not torch.compiler.is_compiling() and has_triton_package()
    fit = here and x.dtype in _TYPES and type(x) in _CLASSES and x.numel() > 0
    return fit and all(ends.dtype == torch.float32 for ends in ranges)


def stored(x: Tensor) -> Tensor:
    """``x`` or a copy of it whose values fill their memory without gaps, for kernels that walk over the memory."""
    return x if x.is_contiguous() or dense(x) else x.contiguous()


def place(each: Tensor, x: Tensor) -> tuple[int, int] | None:
    """Where a value in memory of ``x`` finds its entry of ``each``, which broadcasts: ``(offset // first) % second``.

    ``None`` if the entries differ along several dimensions.
    """
    dims = [dim for dim in range(-each.ndim, 0) if each.shape[dim] != 1]
    if not dims:
        return 1, 1
    return (x.stride(dims[0]), x.shape[dims[0]]) if len(dims) == 1 and each.is_contiguous() else None


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Launch kernels on the GPU of ``x``; entering it takes as long as a launch, so only where another one is set."""
    index = x.get_device()
    return _HERE if index < 0 or index == torch.cuda.current_device() else torch.cuda.device(index)
