"""Helpers of all formats: bits as tensors, and the two bit widths that leave values as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fractrain_fx.config.precision import FLOAT_BITS
from fractrain_fx.errors import InputError

__all__ = [
    "as_bits",
    "checked_bits",
    "dense",
    "highest_level",
    "is_rounded",
    "known_bits",
    "of_options",
    "once",
    "only_unrounded",
    "put_where",
    "readable",
    "rounding",
    "sum_of_samples",
    "unrounded",
    "work_dtype",
]


def as_bits(bits: int | Int[Tensor, "*bits"], x: Tensor) -> Int[Tensor, "*bits"]:
    """``bits`` as a tensor; an int becomes one on the device of ``x``.

    Raises:
        InputError: an int outside 0..32.
    """
    if isinstance(bits, Tensor):
        return bits
    if not 0 <= bits <= FLOAT_BITS:
        raise InputError(f"bits={bits} must lie in 1..31, or be 0 or {FLOAT_BITS} to leave the tensor as it is")
    return torch.tensor(bits, device=x.device)


def checked_bits(bits: int | Int[Tensor, "*bits"], x: Tensor) -> Int[Tensor, "*bits"]:
    """``bits`` as a tensor, whose values are looked at unless that would wait for a device or break a compiled graph.

    Raises:
        InputError: ``bits`` that are not whole numbers from 0 to 32, or that do not broadcast against ``x``.
    """
    if isinstance(bits, Tensor):
        whole = not bits.is_floating_point() and not bits.is_complex() and bits.dtype != torch.bool
        sizes = zip(reversed(bits.shape), reversed(x.shape), strict=False)
        if bits.ndim > x.ndim or any(length not in (1, size) for length, size in sizes):
            raise InputError(f"bits of shape {tuple(bits.shape)} do not broadcast against {tuple(x.shape)}")
        if whole and readable(bits) and bits.numel() and not 0 <= int(bits.min()) <= int(bits.max()) <= FLOAT_BITS:
            raise InputError(f"bits from {int(bits.min())} to {int(bits.max())} must lie in 0..{FLOAT_BITS}")
    else:
        whole = isinstance(bits, int) and not isinstance(bits, bool)
    if not whole:
        shown = f"a tensor of {bits.dtype}" if isinstance(bits, Tensor) else repr(bits)
        raise InputError(f"bits must be whole numbers from 0 to {FLOAT_BITS}, not {shown}")
    return as_bits(bits, x)


def is_rounded(bits: Int[Tensor, "*bits"]) -> Bool[Tensor, "*bits"]:
    """Whether each width rounds: all do except 0 and 32."""
    return (bits != 0) & (bits != FLOAT_BITS)


def highest_level(bits: Int[Tensor, "*bits"], dtype: torch.dtype) -> Float[Tensor, "*bits"]:
    """``2^bits - 1``, the number of the highest level; 1 for 0 bits, whose result :func:`unrounded` replaces."""
    return ((1 << bits.long()) - 1).clamp(min=1).to(dtype)


def readable(x: Tensor) -> bool:
    """Whether the host can read values without waiting for a device or breaking a compiled graph."""
    return x.is_cpu and not torch.compiler.is_compiling()


def once(x: Tensor) -> Tensor:
    """``x``, which a compiled graph computes once before its loop over values instead of in every iteration.

    torch's compiler takes arithmetic on single numbers for free and repeats it in the loop, but on a CPU the few
    numbers of a rounding then take longer than its values. It does not fuse through an ``as_strided`` view.
    """
    compiled = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    return x.as_strided(x.shape, x.stride()) if compiled and x.is_cpu else x


def only_unrounded(bits: Int[Tensor, "*bits"]) -> bool:
    """Whether every width is 0 or 32. It reads them."""
    return set(bits.flatten().tolist()) <= {0, FLOAT_BITS}


def known_bits(bits: Int[Tensor, "*bits"]) -> int | None:
    """The width of all values; ``None`` if there are several or the host cannot read it at no cost."""
    return int(bits) if bits.numel() == 1 and readable(bits) else None


def unrounded(bits: Int[Tensor, "*bits"], x: Tensor, rounded: Tensor) -> Tensor:
    """``x``, bit for bit, where ``bits`` is 0 or 32, else ``rounded`` (which may be written into)."""
    return put_where(bits, (0, FLOAT_BITS), x, rounded)


def put_where(bits: Int[Tensor, "*bits"], which: tuple[int, ...], values: Tensor | float, target: Tensor) -> Tensor:
    """``values`` where ``bits`` is one of ``which``, else ``target`` (which may be written into).

    On a CPU ``torch.where`` takes longer than a whole rounding, so there only the samples concerned are written.
    """
    dims = [dim for dim, size in enumerate(bits.shape) if size != 1]
    if not readable(bits) or len(dims) > 1 or (dims and bits.ndim != target.ndim):
        mask = reduce(or_, [bits == width for width in which])
        return torch.where(mask, values, target)
    meant = [index for index, width in enumerate(bits.flatten().tolist()) if width in which]
    if not meant:
        return target
    if not dims:
        return torch.full_like(target, values) if isinstance(values, float) else values
    index = torch.tensor(meant)
    if isinstance(values, float):
        return target.index_fill_(dims[0], index, values)
    return target.index_copy_(dims[0], index, values.index_select(dims[0], index))


def rounding(options: Sequence[int]) -> set[int]:
    """The distinct widths of the options, without 0 and 32, which do not round."""
    return set(options) - {0, FLOAT_BITS}


def of_options(
    options: Sequence[int], found: Callable[[Sequence[int]], Float[Tensor, "batch widths"]]
) -> Float[Tensor, "batch options"]:
    """A column for each option: the one that ``found`` gives for its width, or 0 if the width does not round.

    ``found`` is called once, with the distinct widths that round.
    """
    widths = sorted(rounding(options))
    columns = found(widths)
    by_bits = dict(zip(widths, columns.unbind(1), strict=True))
    none = torch.zeros_like(columns[:, 0])
    return torch.stack([by_bits.get(bits, none) for bits in options], dim=1)


def sum_of_samples(parts: Float[Tensor, "batch ..."], squared: bool) -> Float[Tensor, " batch"]:
    """The sum over each sample of some parts, or of their squares."""
    parts = parts.flatten(1)
    return (parts.square() if squared else parts).sum(1)


def dense(x: Tensor) -> bool:
    """Whether the values fill their memory without gaps, in any order of dimensions."""
    order = sorted(range(x.ndim), key=lambda dim: (x.stride()[dim], x.shape[dim]), reverse=True)
    return x.permute(order).is_contiguous()


def work_dtype(x: Tensor) -> torch.dtype:
    """The type to compute in: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)
