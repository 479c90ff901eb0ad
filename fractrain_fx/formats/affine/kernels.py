"""The affine format by C++ kernels on a CPU (``rounding="compiled"``): in one pass over memory, the formula's numbers.

As plain operations a rounding takes three passes for one width, more for samples of several, and its gate gradient five
for each option; and each of them is a call from Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from fractrain_fx.formats.base import ValueRange
from fractrain_fx.formats.noise import draw_seed
from fractrain_fx.native import kernels

__all__ = [
    "code_ends_compiled",
    "coded_compiled",
    "coded_gradient_compiled",
    "encode_compiled",
    "gains_compiled",
    "has_gains",
    "has_kernels",
    "measure_compiled",
    "round_channels_compiled",
    "round_compiled",
]

# What the kernel says it did, besides rounding.
_UNROUNDED, _REFUSED = 0, 2


def has_kernels(x: Tensor, lo: Tensor | None = None) -> bool:
    """Whether the kernels take values, rounded in a range with that low end: float32 on a CPU, not empty."""
    return not torch.compiler.is_compiling() and _fit(x, lo)


def has_gains(x: Tensor, lo: Tensor) -> bool:
    """The same of :func:`gains_compiled`, which graphs that ``torch.compile`` made call too.

    A rounding they fuse with what is around it; all options at once are too much for the code that a compiler makes.
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
    erase: bool = False,
    out: Tensor | None = None,
) -> Tensor | None:
    """What :func:`~fractrain_fx.formats.affine.rounding.round_affine` gives where it is not quick, bit for bit.

    The noise is that of compiled graphs, a hash, as reading it from memory takes longer than all else.

    Args:
        x: values.
        bits: one width, or widths that broadcast against ``x``.
        within: the range, one for all values or one for each channel.
        stochastic: add noise before rounding.
        seed: of that noise.
        erase: whether values of 0 bits become 0 instead of staying as they are.
        out: memory for the result; may be ``x``.

    Returns:
        The result; where nothing is rounded ``x`` itself; ``None`` where the range is not finite or differences in it
        may overflow.
    """
    out = torch.empty_like(x) if out is None else out
    number = _number(stochastic, seed)
    done = kernels().round_affine(x, bits, within.lo, within.span, number, within.measured_here, erase, out=out)
    return _result(done, x, out)


def round_channels_compiled(w: Tensor, bits: Tensor, out: Tensor) -> tuple[ValueRange, Tensor | None]:
    """Range and rounding of each entry of the first dimension in one look.

    Args:
        w: contiguous values.
        bits: one width.
        out: contiguous memory for the result.

    Returns:
        The ranges, and the result as :func:`round_compiled` gives it.
    """
    lo, span, done = kernels().round_channels(w, bits, out=out)
    return ValueRange(lo, span, True), _result(done, w, out)


def _result(done: int, x: Tensor, out: Tensor) -> Tensor | None:
    if done == _UNROUNDED:
        return x
    return None if done == _REFUSED else out


def encode_compiled(
    x: Tensor,
    bits: Tensor,
    within: ValueRange,
    codes: Tensor,
    values: Tensor | None,
    *,
    stochastic: bool = False,
    seed: Tensor | None = None,
) -> bool:
    """Write the codes of what :func:`round_compiled` gives, and those values: in one pass.

    Args:
        x: values.
        bits: as there.
        within: as there.
        codes: memory of the shape of ``x``. In uint8 they are the numbers of levels, in int8 and int16 those less
            ``2^(bits - 1)``; where bits are 0 or 32 they mean nothing.
        values: memory for the values, or ``None``; may be ``x``.
        stochastic: as there.
        seed: as there.

    Returns:
        Whether it was done; not where the range is not finite or differences in it may overflow.
    """
    lo, span, measured_here = within
    number = _number(stochastic, seed)
    done = kernels().encode_affine(x, bits, lo, span, number, measured_here, codes=codes, values=values)
    return bool(done != _REFUSED)


def code_ends_compiled(bits: Tensor, lo: Tensor, span: Tensor) -> tuple[Tensor, Tensor]:
    """What :func:`~fractrain_fx.formats.affine.rounding.code_ends` gives."""
    scale, zero = kernels().code_ends(bits, lo, span)
    return scale, zero


def coded_compiled(x: Tensor, bits: Tensor, within: ValueRange) -> tuple[Tensor, Tensor, Tensor] | None:
    """Signed codes of one byte, their scales and zeros, one for each entry of ``bits`` or of the range, in one call.

    Args:
        x: values.
        bits: as :func:`round_compiled` takes them.
        within: as there.

    Returns:
        Codes of the shape of ``x``, and flat scales and zeros; ``None`` as there.
    """
    done, *coded = kernels().coded_operand(x, bits, *within)
    return None if done == _REFUSED else tuple(coded)


def coded_gradient_compiled(
    g: Tensor, bits: Tensor, seed: Tensor | None, dtype: torch.dtype, values: Tensor | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The same of a gradient, rounded with noise in its own range. Those of 0 bits are 0, with scale and zero 0.

    Args:
        g: values.
        bits: as there.
        seed: of the noise.
        dtype: of the codes, int8 or int16.
        values: memory for the rounded values, where they are wanted.
    """
    done, *coded = kernels().coded_gradient(g, bits, _number(True, seed), dtype == torch.int16, values=values)
    return None if done == _REFUSED else tuple(coded)


def gains_compiled(x: Tensor, g: Tensor, bits: Sequence[int], within: ValueRange, *, twice: bool = False) -> Tensor:
    """What ``gate_gradient.affine_gains`` gives; ``twice``: of values of type bfloat16."""
    gains = torch.ops.fractrain_fx.gains if torch.compiler.is_compiling() else kernels().gains
    found: Tensor = gains(x, g, bits, *within, twice)
    return found


def _gains_in_graphs() -> bool:
    """Tells torch's compiler what the op gives; nothing of this is compiled."""
    _register_gains()
    return True


# What `torch.compiler.assume_constant_result` sets, which would import all of the compiler with this package.
_gains_in_graphs._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _register_gains() -> None:
    kernels()
    torch.library.register_fake("fractrain_fx::gains", _gains_like)


def _gains_like(
    x: Tensor, g: Tensor, bits: Sequence[int], lo: Tensor, span: Tensor, inside: bool, twice: bool = False
) -> Tensor:
    return x.new_empty((len(x), len(bits)))


def measure_compiled(x: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """What :func:`~fractrain_fx.formats.affine.measure` gives of all values, or of entries of the first dimension."""
    lo, span = kernels().measure(x, shape)
    return lo, span


def _number(stochastic: bool, seed: Tensor | None) -> int | None:
    return int(draw_seed() if seed is None else seed) if stochastic else None
