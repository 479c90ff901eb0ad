"""The affine format by C++ kernels on a CPU (``backend="cpu"``): the formula's numbers in one pass over memory.

As operations of torch, a rounding takes five passes for one width and more for samples of several widths; the gate's
gradient takes five for each option. Each pass is a call from Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fractrain_fx.formats.base import ValueRange
from fractrain_fx.formats.noise import noise_number
from fractrain_fx.native import kernels, known_to_compiler

__all__ = [
    "code_ends_compiled",
    "coded_compiled",
    "coded_gradient_compiled",
    "gains_compiled",
    "has_gains",
    "has_kernels",
    "measure_compiled",
    "round_compiled",
]

# Outcomes of a kernel other than a rounded tensor (``Outcome`` in csrc/rounding.h).
_UNROUNDED, _REFUSED = 0, 2


def has_kernels(x: Tensor, lo: Tensor | None = None) -> bool:
    """Whether the kernels take the values, in eager mode: float32 as their range is, on a CPU, not empty."""
    return not torch.compiler.is_compiling() and _fit(x, lo)


def has_gains(x: Tensor, lo: Tensor) -> bool:
    """Whether :func:`gains_compiled` takes the values. Compiled graphs call it too.

    ``torch.compile`` fuses a rounding with the ops around it, but makes no good code for all options at once.
    """
    return _fit(x, lo) and (not torch.compiler.is_compiling() or _gains_in_graphs())


def _fit(x: Tensor, lo: Tensor | None) -> bool:
    single = x.dtype == torch.float32 and (lo is None or lo.dtype == torch.float32)
    return single and x.is_cpu and x.numel() > 0


def round_compiled(
    x: Tensor,
    bits: Tensor,
    within: ValueRange,
    *,
    stochastic: bool = False,
    seed: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | None:
    """Round like :func:`~fractrain_fx.formats.affine.rounding.round_affine`, bit for bit.

    Only the noise differs: it is a hash, as in compiled graphs, because reading noise from memory takes longer than all
    the rest.

    ``bits`` is one width, or widths that broadcast against ``x``; ``within`` is one range for all values or one for
    each channel; ``out`` may be ``x``. The result is ``x`` itself if nothing is rounded, and ``None`` if the range is
    not finite or differences in it may overflow.
    """
    out = torch.empty_like(x) if out is None else out
    number = noise_number(stochastic, seed)
    done = kernels().round_affine(x, bits, within.lo, within.span, number, within.measured_here, out=out)
    if done == _UNROUNDED:
        return x
    return None if done == _REFUSED else out


def code_ends_compiled(bits: Tensor, lo: Tensor, span: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero of signed codes, ``value = scale * code + zero``; the zero is NaN if the range is not finite."""
    scale, zero = kernels().code_ends(bits, lo, span)
    return scale, zero


def coded_compiled(x: Tensor, bits: Tensor, within: ValueRange) -> tuple[Tensor, Tensor, Tensor] | None:
    """Signed one-byte codes of the shape of ``x`` with flat scales and zeros, in one call.

    There is a scale and a zero for each entry of ``bits`` or of the range (as :func:`round_compiled` takes them). The
    result is ``None`` if the range is not finite or differences in it may overflow.
    """
    done, *coded = kernels().coded_operand(x, bits, *within)
    return None if done == _REFUSED else tuple(coded)


def coded_gradient_compiled(
    g: Tensor, bits: Tensor, seed: Tensor | None, dtype: torch.dtype, values: Tensor | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The codes, scales and zeros of a gradient, rounded with noise in its own range.

    Values of 0 bits become 0, with scale and zero 0. Codes are int8 or int16; ``values`` is memory for the rounded
    values, if they are wanted.
    """
    done, *coded = kernels().coded_gradient(g, bits, noise_number(True, seed), dtype == torch.int16, values=values)
    return None if done == _REFUSED else tuple(coded)


def gains_compiled(
    x: Tensor, g: Tensor, bits: Sequence[int], within: ValueRange, *, squared: bool = False, twice: bool = False
) -> Tensor:
    """The format's ``activation_gains`` by the C++ kernel; ``twice``: values are bfloat16 numbers, held in float32."""
    gains = torch.ops.fractrain_fx.gains if torch.compiler.is_compiling() else kernels().gains
    sums: Tensor = gains(x, g, bits, *within, twice, squared)
    return sums


def measure_compiled(x: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """:func:`~fractrain_fx.formats.affine.measure` by the C++ kernel, for all values or entries of dimension 0."""
    lo, span = kernels().measure(x, shape)
    return lo, span


def _gains_like(x: Tensor, g: Tensor, bits: Sequence[int], *_: Any) -> Tensor:
    return x.new_empty((len(x), len(bits)))


_gains_in_graphs = known_to_compiler({"gains": _gains_like})
