"""What all formats share: bits as tensors, and the two bit widths that round nothing."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fractrain_fx.errors import InputError
from fractrain_fx.precision import FLOAT_BITS

__all__ = ["all_rounded", "as_bits", "highest_level", "is_rounded", "none_rounded", "unrounded", "work_dtype"]


def as_bits(bits: int | Int[Tensor, "*bits"], x: Tensor) -> Int[Tensor, "*bits"]:
    """``bits`` as a tensor where ``x`` is.

    Raises:
        InputError: an int outside 0..32.
    """
    if isinstance(bits, Tensor):
        return bits
    if not 0 <= bits <= FLOAT_BITS:
        raise InputError(f"bits={bits} must lie in 1..31, or be 0 or {FLOAT_BITS} to leave the tensor as it is")
    return torch.tensor(bits, device=x.device)


def is_rounded(bits: Int[Tensor, "*bits"]) -> Bool[Tensor, "*bits"]:
    """Where ``bits`` ask for rounding: everywhere but at 0 and 32."""
    return (bits != 0) & (bits != FLOAT_BITS)


def highest_level(bits: Int[Tensor, "*bits"], dtype: torch.dtype) -> Float[Tensor, "*bits"]:
    """``2^bits - 1``, the number of the highest level; 1 for 0 bits, whose result :func:`unrounded` replaces."""
    return ((1 << bits.long()) - 1).clamp(min=1).to(dtype)


def none_rounded(bits: Int[Tensor, "*bits"]) -> bool:
    """Whether ``bits`` are known, without waiting for a device or breaking a compiled graph, to round nothing."""
    return _readable(bits) and not bool(is_rounded(bits).any())


def all_rounded(bits: Int[Tensor, "*bits"]) -> bool:
    """Whether ``bits`` are known, without waiting for a device or breaking a compiled graph, to round every value."""
    return _readable(bits) and bool(is_rounded(bits).all())


def _readable(bits: Tensor) -> bool:
    return bits.device.type == "cpu" and not torch.compiler.is_compiling()


def unrounded(bits: Int[Tensor, "*bits"], x: Tensor, rounded: Tensor) -> Tensor:
    """``x``, bit for bit, where ``bits`` is 0 or 32, else ``rounded``; written into ``rounded``, outside autograd.

    ``torch.where`` would do; on a CPU it costs more than all of an affine rounding, these passes half as much.
    """
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    replaced = is_rounded(bits).to(words).neg()  # every bit set where the rounded value stays
    rounded.view(words).bitwise_xor_(x.view(words)).bitwise_and_(replaced).bitwise_xor_(x.view(words))
    return rounded


def work_dtype(x: Tensor) -> torch.dtype:
    """The type to compute in: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)
