"""The cost of a run on BitFusion, and in bit operations, from the options that were chosen in each epoch.

Three quantities are summed: *MACs* (the paper's bit operations, in units of a 32 x 32 bit product), *time* and
*energy*. BitFusion has no floating point: float ops are priced as 32-bit integers, with 16 passes of the array for each
product, which agrees with the MACs. Compare ``RunCost.steered``, the ops that the method steers, with the paper, which
counts every layer at the stated bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fractrain_fx.config.precision import Precision
from fractrain_fx.errors import ConfigError
from fractrain_fx.hardware.bitfusion_machine import BitFusion
from fractrain_fx.hardware.chosen import STEERED, by_stage, choice_of, taken
from fractrain_fx.hardware.machine import PATHS, Machine
from fractrain_fx.nn.cost import OpCost
from fractrain_fx.passes import Op, costed

if TYPE_CHECKING:
    from fractrain_fx.engine.rows import EpochRow
    from fractrain_fx.model import FracModel

__all__ = ["Amount", "Entry", "Key", "RunCost", "StepPrices", "run_cost"]

Key = Literal["stage", "block", "op", "path"]
Sums = NDArray[np.float64]  # [FW, EB, GC] x [MACs, seconds, joules]

_FEWEST = Precision(2, 2)


class Amount(NamedTuple):
    """MACs at 32 bits, seconds and joules: on BitFusion at 500 MHz, and dynamic."""

    macs: float
    seconds: float
    joules: float


class Entry(NamedTuple):
    """The cost of one op in one stage.

    ``steered`` tells gated and scheduled ops from float and pinned ones; ``sums`` are over all samples.
    """

    stage: str
    block: str
    op: str
    steered: bool
    sums: Sums


@dataclass(frozen=True)
class RunCost:
    """Sums over a run, by path, op, block and stage.

    ``unpriced`` ops have no price on the machine (such as recurrent layers): their MACs are counted if there is a
    formula, their time and energy are not.
    """

    entries: tuple[Entry, ...]
    samples: int
    unpriced: tuple[str, ...] = ()

    @property
    def total(self) -> Amount:
        """The cost of all ops."""
        return _amount(_sum(entry.sums for entry in self.entries))

    @property
    def steered(self) -> Amount:
        """The cost of the ops whose precision the method steers; compare the paper's numbers with it."""
        return _amount(_sum(entry.sums for entry in self.entries if entry.steered))

    def by(self, key: Key) -> dict[str, Amount]:
        """The total, split by ``stage``, ``block``, ``op`` or ``path``."""
        if key == "path":
            sums = _sum(entry.sums for entry in self.entries)
            return _by_path(sums)
        return {name: _amount(sums) for name, sums in self._groups(key).items()}

    def _groups(self, key: Key) -> dict[str, Sums]:
        groups: dict[str, list[Sums]] = {}
        for entry in self.entries:
            groups.setdefault(getattr(entry, key), []).append(entry.sums)
        return {name: _sum(parts) for name, parts in groups.items()}

    def to_dict(self) -> dict[str, object]:
        """Plain values: both totals and every split; splits by stage, block and op have ``paths``."""
        splits: dict[str, Key] = {"by_stage": "stage", "by_block": "block", "by_op": "op"}
        return {
            "total": self.total._asdict(),
            "steered": self.steered._asdict(),
            "by_path": _plain_paths(self.by("path")),
            **{
                split: {
                    name: _amount(sums)._asdict() | {"paths": _plain_paths(_by_path(sums))}
                    for name, sums in self._groups(key).items()
                }
                for split, key in splits.items()
            },
            "samples": self.samples,
            "unpriced": list(self.unpriced),
        }


class StepPrices:
    """Prices of a model's ops for one sample of the example's sizes, at any bits.

    Args:
        model: a rewritten model.
        batch: samples of a training step, which share the weights. If samples take several options, each option is
            priced at the size of the whole batch.
        machine: BitFusion by default. If it has no figure for energy, joules are NaN.

    Attributes:
        ops: every counted op with the cost of its three products.
        unpriced: names of ops without a price, among those that were priced so far: on BitFusion all ops of formats
            ``mx``, ``nvfp4``, ``fp8`` and ``int``, as it has no scales inside a sum.
    """

    def __init__(self, model: FracModel, batch: int, machine: Machine | None = None) -> None:
        if batch < 1:
            raise ConfigError(f"batch={batch} must be at least 1 sample")
        self.model = model
        self.batch = batch
        self.machine: Machine = machine or BitFusion()
        self.ops: list[tuple[Op, OpCost]] = costed(model.graph_module, model.frac_config)
        self._outside = {op.name for op, cost in self.ops if op.macs and not self._takes(op, cost)}
        self.unpriced = {op.name for op in model.ops if op.macs is None} | self._outside
        self._sums: dict[tuple[str, Precision, int], Sums] = {}

    def of(self, op: Op, cost: OpCost, precision: Precision, weight_bits: int | None = None) -> Sums:
        """The cost of FW, EB and GC for one sample; ``weight_bits`` defaults to the forward bits."""
        weight = precision.fw if weight_bits is None or not cost.weight else weight_bits
        key = (op.name, precision, weight)
        if key not in self._sums:
            self._sums[key] = self._price(op, cost, precision, weight)
        return self._sums[key]

    def _price(self, op: Op, cost: OpCost, precision: Precision, weight_bits: int) -> Sums:
        sums = np.zeros((len(PATHS), 3))
        if precision.skips:
            return sums
        sums[:, 0] = cost.spent(precision, weight_bits)
        if not op.macs or op.name in self._outside:
            return sums
        choice = choice_of(op, cost, self.model.frac_config, precision, weight_bits)
        step = self.machine.step([op], {op.name: (choice,)}, batch=self.batch).ops.get(op.name)
        if step is None:
            self.unpriced.add(op.name)
            return sums
        for row, path in enumerate(PATHS):
            if (part := step.parts.get(path)) is not None:
                joules = math.nan if part.joules is None else part.joules
                sums[row, 1:] = part.seconds / self.batch, joules / self.batch
        return sums

    def _takes(self, op: Op, cost: OpCost) -> bool:
        """Whether the machine has a price for an op in its number format, at the fewest bits.

        An op without one has no price in float either, so that a run in this format does not get the price of a few
        layers.
        """
        rounded = choice_of(op, cost, self.model.frac_config, _FEWEST, _FEWEST.fw)
        return op.name in self.machine.step([op], {op.name: (rounded,)}, batch=self.batch).ops


def run_cost(prices: StepPrices, rows: Iterable[EpochRow]) -> RunCost:
    """The cost of a ledger's epochs, each at the precisions it was trained at."""
    stages = by_stage(rows)
    entries = tuple(
        Entry(stage, op.block or "", op.name, op.precision.mode in STEERED, row.samples * _spent(prices, op, cost, row))
        for stage, row in stages.items()
        for op, cost in prices.ops
    )
    samples = sum(row.samples for row in stages.values())
    return RunCost(entries, samples, tuple(sorted(prices.unpriced)))


def _spent(prices: StepPrices, op: Op, cost: OpCost, row: EpochRow) -> Sums:
    """The mean cost of an op for one sample of an epoch."""
    chosen = taken(prices.model, op, row)
    return _sum(share * prices.of(op, cost, precision, bits) for share, precision, bits in chosen)


def _sum(parts: Iterable[Sums]) -> Sums:
    return sum(parts, start=np.zeros((len(PATHS), 3)))


def _amount(sums: Sums) -> Amount:
    return Amount(*sums.sum(axis=0).tolist())


def _by_path(sums: Sums) -> dict[str, Amount]:
    return {path: _amount(sums[index : index + 1]) for index, path in enumerate(PATHS)}


def _plain_paths(paths: dict[str, Amount]) -> dict[str, dict[str, float]]:
    return {path: amount._asdict() for path, amount in paths.items()}
