"""What is wrong with an operand: the rules by which a comparison, or a watched step, names an op."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Literal

import torch
from torch import Tensor

from fractrain_fx.numerics.records import OperandRecord

__all__ = ["Finding", "Kind", "Peak", "find", "peak_of"]

Kind = Literal["not finite", "zero", "block scales", "outlier", "magnitude", "clipped", "rounding"]

# An operand is far out if its largest value is so many times that of other channels, or of the other ops' operands.
# Trained networks stay below a few hundred.
_FAR = 1000.0
_CLIPPED = 0.5
_SATURATED = 0.5

_NAMES = {"x": "input x", "w": "w", "g": "output gradient g", "y": "output y"}
_LONGEST = 1 << 16  # channels, heads or positions of a dimension in which outliers are looked for


@dataclass(frozen=True)
class Peak:
    """The ``index`` of dimension ``dim`` (from 0) at which a tensor is largest.

    ``ratio`` is its largest value, relative to that of the median index.
    """

    dim: int
    index: int
    ratio: float


@dataclass(frozen=True)
class Finding:
    """An operand that is beyond a bound.

    Attributes:
        op: the op's name.
        operand: ``x``, ``w``, ``g`` or ``y``, the output.
        product: ``FW``, ``EB`` or ``GC``.
        kind: what is wrong.
        why: the numbers, in words.
    """

    op: str
    operand: str
    product: str
    kind: Kind
    why: str

    def __str__(self) -> str:
        return f"{self.op}, {_NAMES[self.operand]} of {self.product}: {self.why}"


def find(
    records: Iterable[OperandRecord],
    order: Sequence[str],
    bound: float,
    peaks: Mapping[tuple[str, str], Peak] | None = None,
) -> tuple[Finding, ...]:
    """Everything that is beyond a bound, in the order in which a step computes it.

    ``order`` has the ops in the order of the forward pass. The bound is of the rounding error of ``x`` and ``w``,
    relative to their norm; twice that for gradients, as rounding stochastically has twice the noise. ``peaks`` are of
    the operands and outputs of the forward product, by op and operand.
    """
    actual = [record for record in records if not record.as_if]
    usual = {letter: _usual(actual, letter) for letter in "xwy"}
    place = {name: index for index, name in enumerate(order)}
    steps: list[tuple[tuple[int, int, str], OperandRecord, str]] = []
    for record in actual:
        at = place.get(record.op, len(place))
        for product in record.products:
            forward = product == "FW"
            steps.append(((0, at, "xwy") if forward else (1, -at, product), record, product))
    steps.sort(key=lambda step: (*step[0], "xwgy".index(step[1].operand)))
    findings = []
    for _, record, product in steps:
        peak = (peaks or {}).get((record.op, record.operand)) if product == "FW" else None
        verdict = next(_verdicts(record, bound, usual.get(record.operand), peak), None)
        if verdict is not None:
            findings.append(Finding(record.op, record.operand, product, *verdict))
    return tuple(findings)


@torch.no_grad()
def peak_of(x: Tensor, *, batched: bool) -> Peak | None:
    """Where a tensor is largest, seen along each dimension; ``None`` without dimensions to compare.

    If ``batched``, the first dimension holds samples, which are not compared.
    """
    best: Peak | None = None
    for dim in range(1 if batched else 0, x.ndim):
        if not 1 < x.shape[dim] <= _LONGEST or not x.numel():
            continue
        sizes = x.detach().abs().amax([axis for axis in range(x.ndim) if axis != dim]).float()
        middle, top = float(sizes.median()), float(sizes.max())
        if middle > 0 and math.isfinite(top) and (best is None or top / middle > best.ratio):
            best = Peak(dim, int(sizes.argmax()), top / middle)
    return best


def _usual(records: Iterable[OperandRecord], letter: str) -> float | None:
    """The median of the largest values of one operand of all ops; ``None`` for few ops."""
    sizes = [record.statistics.largest for record in records if record.operand == letter and record.statistics.finite]
    return median_low(sizes) if len(sizes) > 2 else None


def _verdicts(
    record: OperandRecord, bound: float, usual: float | None, peak: Peak | None
) -> Iterator[tuple[Kind, str]]:
    """What is wrong, the plainest first."""
    stats = record.statistics
    if not stats.finite:
        yield "not finite", "some values are NaN or infinite"
        return
    if stats.zero == 1.0 and record.operand == "x":
        yield "zero", "every value is 0, so what computes it is dead"
        return
    if stats.saturated is not None and stats.saturated > _SATURATED:
        yield (
            "block scales",
            f"{stats.saturated:.0%} of the block scales are below what their type holds, so these blocks become 0",
        )
    if peak is not None and peak.ratio > _FAR:
        yield (
            "outlier",
            f"index {peak.index} of dimension {peak.dim} is {peak.ratio:.2g} times as large as the others, and reaches "
            f"{stats.largest:.3g}",
        )
    if usual and record.operand in "xw" and stats.largest > _FAR * usual:
        yield "magnitude", f"it reaches {stats.largest:.3g}, and that of the other ops {usual:.2g}"
    if stats.clipped > _CLIPPED:
        yield "clipped", f"{stats.clipped:.0%} of the values lie beyond the levels"
    if record.operand != "y" and stats.error > (2 * bound if record.operand == "g" else bound):
        yield (
            "rounding",
            f"{stats.bits:.3g} bits leave {stats.sqnr:.1f} dB: rounding changes it by {stats.error:.2g} of its norm",
        )
