"""Statistics of one rounded operand: how much of it survives the rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fractrain_fx.execution.roundings import Rounding
from fractrain_fx.formats.bits import is_rounded, readable, work_dtype
from fractrain_fx.formats.microscaling.elements import exponents

__all__ = ["COLUMNS", "Measured", "Statistics", "measure", "measure_output", "statistics_of"]

COLUMNS = (
    *("count", "signal", "noise", "lo", "hi", "nonzero", "underflowed", "clipped"),
    *("saturated", "blocks", "bits", "running_lo", "running_span"),
)
"""The numbers that :func:`measure` gives; ``signal`` and ``noise`` are norms in one unit."""

_EXPONENTS = 256  # bins of a histogram: one for each exponent of a float32 number
_LOWEST = -127
_USUALLY_0 = ("clipped", "underflowed", "zero")  # left out of files where they are
# Squares of values between these neither vanish nor overflow in float32.
_MODEST = 1e-15, 1e15


class Measured(NamedTuple):
    """The numbers (:data:`COLUMNS`) that were measured of an operand, on its device.

    ``scales`` tells how many blocks have a scale of each exponent, from -127 on; ``None`` without blocks.
    """

    numbers: Float[Tensor, " columns"]
    scales: Tensor | None = None


@dataclass(frozen=True)
class Statistics:
    """How an operand was rounded. Shares lie in 0..1.

    Attributes:
        sqnr: signal-to-quantization-noise ratio in dB; ``None`` if nothing was lost, or a value is not finite.
        bits: mean width of its values.
        effective_bits: the width at which a full-scale sine has this ratio, ``(sqnr - 1.76) / 6.02``.
        clipped: share of values beyond the levels.
        underflowed: share of values that are not 0 and that rounding to nearest takes to the level of 0.
        zero: share of values that are exactly 0 before they are rounded.
        lo: the lowest value.
        hi: the highest value; ``None``, as ``lo`` is then, if a value is not finite.
        running: low and high end of the running range, in which evaluation rounds; ``None`` if there is none.
        saturated: share of blocks whose scale is beyond its type; ``None`` without blocks.
        scales: by exponent, the number of blocks with a scale of ``2^exponent`` up to twice that; ``None`` without.
    """

    sqnr: float | None
    bits: float
    effective_bits: float | None
    clipped: float
    underflowed: float
    zero: float
    lo: float | None
    hi: float | None
    running: tuple[float, float] | None = None
    saturated: float | None = None
    scales: dict[int, int] | None = None

    @property
    def finite(self) -> bool:
        """Whether all values are finite."""
        return self.hi is not None

    @property
    def largest(self) -> float:
        """The largest size of a value; infinite if one is not finite."""
        return math.inf if self.lo is None or self.hi is None else max(abs(self.lo), abs(self.hi))

    @property
    def error(self) -> float:
        """Norm of what rounding changes, relative to the norm of the values."""
        return 0.0 if self.sqnr is None else 10 ** (-self.sqnr / 20)

    def to_dict(self) -> dict[str, Any]:
        """Plain values of four significant digits; only those that say something."""
        plain: dict[str, Any] = {}
        for name, value in vars(self).items():
            if name == "scales" and value is not None:
                plain[name] = {str(exponent): count for exponent, count in value.items()}
            elif name == "running" and value is not None:
                plain[name] = [_short(end) for end in value]
            elif value is not None and (value or name not in _USUALLY_0):
                plain[name] = _short(value)
        return plain

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Statistics:
        """Read the result of :meth:`to_dict`."""
        values: dict[str, Any] = (
            dict.fromkeys(_USUALLY_0, 0.0) | dict.fromkeys(("sqnr", "effective_bits", "lo", "hi")) | plain
        )
        if "scales" in plain:
            values["scales"] = {int(exponent): count for exponent, count in plain["scales"].items()}
        if "running" in plain:
            values["running"] = tuple(plain["running"])
        return cls(**values)


@torch.no_grad()
def measure(rounding: Rounding, running: tuple[Tensor, Tensor] | None = None) -> Measured:
    """Measure an operand, which is not empty. A value on another device than a CPU is not waited for.

    ``running`` has low end and width of its running range.
    """
    v, q = rounding.values.detach(), rounding.rounded().detach()
    counted = rounding.fmt.count(v, q, rounding.bits, rounding.of)
    if counted is not None:
        bits = rounding.bits.to(torch.float32).mean()
        count, of_range = bits.new_tensor(v.numel()), running or (bits.new_tensor(torch.nan),) * 2
        numbers = [count, *counted.numbers.to(torch.float32), bits, *of_range]
        return Measured(torch.stack(numbers), counted.scales)
    v = v.to(work_dtype(v))
    q, reach = q.to(v.dtype), rounding.reach()
    lo, hi = torch.aminmax(v)
    size = torch.maximum(lo.abs(), hi.abs())
    error, scaled, of_scale = v - q, v, torch.ones_like(size)
    if not readable(size) or not _MODEST[0] < float(size) < _MODEST[1]:
        of_scale = torch.where(size > 0, size, 1)
        scaled, error = v / of_scale, error.div_(of_scale)
    rounds = is_rounded(rounding.bits)
    counter = _Counter(v)
    zeros = counter.of(torch.eq, 0)
    zero = _Counter(q).of(torch.eq, 0) - zeros if reach.zero is None else _between(counter, reach.zero)
    numbers = [
        v.new_full((), v.numel()),
        torch.linalg.vector_norm(scaled),
        torch.linalg.vector_norm(error),
        lo,
        hi,
        v.numel() - zeros,
        zero * rounds.any(),
        v.new_zeros(()) if reach.ends is None else counter.beyond(*reach.ends),
        v.new_zeros(()) if reach.saturated is None else _count(reach.saturated),
        v.new_zeros(()) if reach.scales is None else _count(reach.scales != 0),
        rounding.bits.to(v.dtype).mean(),
        *(running or (v.new_full((), torch.nan),) * 2),
    ]
    scales = None if reach.scales is None else _histogram(reach.scales)
    return Measured(torch.stack([x.to(v.device, torch.float32) for x in numbers]), scales)


@torch.no_grad()
def measure_output(x: Tensor) -> Measured:
    """The range and the zeros of a tensor that is not rounded."""
    lo, hi = torch.aminmax(x.detach())
    size, zero, nan = (lo.new_full((), value, dtype=torch.float32) for value in (x.numel(), 0, torch.nan))
    numbers = {"count": size, "nonzero": torch.count_nonzero(x), "lo": lo, "hi": hi, "bits": zero + 32}
    numbers |= {"running_lo": nan, "running_span": nan}
    return Measured(torch.stack([numbers.get(name, zero).to(torch.float32) for name in COLUMNS]))


def statistics_of(numbers: list[float], scales: list[int] | None = None) -> Statistics:
    """The statistics from the numbers of :class:`Measured`."""
    named = dict(zip(COLUMNS, numbers, strict=True))
    count, finite = named["count"], math.isfinite(named["lo"]) and math.isfinite(named["hi"])
    running = named["running_lo"], named["running_span"]
    sqnr = None
    if finite and named["noise"] > 0 and math.isfinite(named["noise"]):
        sqnr = 20 * math.log10(max(named["signal"], 1e-30) / named["noise"])
    blocks = named["blocks"]
    return Statistics(
        sqnr=sqnr,
        bits=named["bits"],
        effective_bits=None if sqnr is None else (sqnr - 1.76) / 6.02,
        clipped=named["clipped"] / count,
        underflowed=max(named["underflowed"], 0.0) / count,
        zero=1 - named["nonzero"] / count,
        lo=named["lo"] if finite else None,
        hi=named["hi"] if finite else None,
        running=None if math.isnan(running[0]) else (running[0], sum(running)),
        saturated=named["saturated"] / blocks if blocks else None,
        scales=None if scales is None else {i + _LOWEST: n for i, n in enumerate(scales) if n},
    )


def _count(mask: Tensor) -> Tensor:
    return mask.sum().to(torch.float32)


class _Counter:
    """Counts values that compare with an end. Comparing into floats, in one memory, is quicker than into booleans."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._holds = torch.empty_like(values)

    def beyond(self, low: Tensor, high: Tensor) -> Tensor:
        """The number of values outside of two ends."""
        return self.of(torch.lt, low) + self.of(torch.gt, high)

    def of(self, compare: Any, end: Tensor | float) -> Tensor:
        """The number of values for which the comparison holds."""
        return self.mask(compare, end).sum()

    def mask(self, compare: Any, end: Tensor | float) -> Tensor:
        """1 where it holds and 0 elsewhere; the next comparison overwrites it."""
        held: Tensor = compare(self.values, end, out=self._holds)
        return held


def _between(counter: _Counter, ends: tuple[Tensor, Tensor]) -> Tensor:
    """The number of values between two ends that are not 0."""
    low, high = ends
    inside = counter.of(torch.le, high) - counter.of(torch.lt, low)
    holds = low.new_zeros(low.shape).copy_(low <= 0).mul_(high >= 0)
    return inside - counter.mask(torch.eq, 0).mul_(holds).sum()


def _histogram(scales: Tensor) -> Tensor:
    """The number of scales of each exponent; those that are 0 or not finite are in none."""
    x = scales.detach().flatten().to(torch.float32)
    usable = torch.isfinite(x) & (x > 0)
    bins = exponents(x.clamp(min=2.0**-126)).long() - _LOWEST
    counts = torch.zeros(_EXPONENTS, device=x.device, dtype=torch.int64)
    return counts.scatter_add_(0, bins.clamp(0, _EXPONENTS - 1), usable.long())


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")
