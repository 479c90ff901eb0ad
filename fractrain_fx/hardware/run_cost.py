"""The cost of a run on BitFusion, and in bit operations, from the options that were chosen in each epoch.

Three quantities are summed: *MACs* (the paper's bit operations, in units of a 32 x 32 bit product), *cycles* and
*energy*. BitFusion has no floating point: float ops are priced as 32-bit integers, with 16 passes of the array for each
product, which agrees with the MACs. Compare ``RunCost.steered``, the ops that the method steers, with the paper, which
counts every layer at the stated bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fractrain_fx.config import BLOCK_FORMATS
from fractrain_fx.config.precision import Precision
from fractrain_fx.errors import ConfigError
from fractrain_fx.hardware.bitfusion import FREQUENCY
from fractrain_fx.hardware.bitfusion_machine import step_of
from fractrain_fx.hardware.chosen import STEERED, by_stage, taken
from fractrain_fx.hardware.machine import PATHS, Choice, Machine, Price
from fractrain_fx.nn.cost import OpCost
from fractrain_fx.passes import Op, Product, costed

if TYPE_CHECKING:
    from fractrain_fx.engine.rows import EpochRow
    from fractrain_fx.model import FracModel

__all__ = ["Amount", "Entry", "Key", "MachinePrices", "RunCost", "StepPrices", "run_cost"]

Key = Literal["stage", "block", "op", "path"]
Sums = NDArray[np.float64]  # [FW, EB, GC] x [MACs, cycles, nJ]


class Amount(NamedTuple):
    """MACs at 32 bits, seconds at 500 MHz and joules (dynamic)."""

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

    Attributes:
        entries: one for each op and stage.
        samples: training samples.
        unpriced: ops without a price on BitFusion (such as recurrent layers): their MACs are counted if there is a
            formula, their cycles and energy are not.
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
    """Prices of a model's ops for one sample, at any bits.

    Args:
        model: a rewritten model.
        batch: samples of a training step, which share the weights. If samples take several options, each option is
            priced at the size of the whole batch.

    Attributes:
        ops: every counted op with the cost of its three products.
        unpriced: names of ops without a price, among those that were priced so far: all ops of formats ``mx``,
            ``nvfp4``, ``fp8`` and ``int``, as BitFusion has no scales inside a sum.
    """

    def __init__(self, model: FracModel, batch: int) -> None:
        if batch < 1:
            raise ConfigError(f"batch={batch} must be at least 1 sample")
        self.model = model
        self.batch = batch
        self.ops: list[tuple[Op, OpCost]] = costed(model.graph_module, model.frac_config)
        self.unpriced = {
            op.name
            for op in model.ops
            if op.macs is None or (op.macs and (op.product is None or not self._knows_format(op)))
        }
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
        product = op.product
        if product is None or not self._knows_format(op):
            return sums
        name = op.precision.format or self.model.frac_config.format
        choice = Choice(precision, weight_bits, name, least=cost.least, by_product=cost.by_product)
        priced = self._amounts(op, product, choice)
        if priced is None:
            self.unpriced.add(op.name)
            return sums
        for path, amounts in enumerate(priced):
            if amounts is not None and cost.macs[path]:
                sums[path, 1:] = np.array(amounts) / self.batch
        return sums

    def _knows_format(self, op: Op) -> bool:
        """Whether there may be a price for the op's number format: BitFusion multiplies integers without scales."""
        return (op.precision.format or self.model.frac_config.format) not in BLOCK_FORMATS

    def _amounts(self, op: Op, product: Product, choice: Choice) -> Sequence[tuple[float, float] | None] | None:
        """Cycles and nJ of FW, EB and GC of the whole batch; ``None`` where the machine has no price."""
        found = step_of(product, choice, self.batch)
        if found is None:
            return None
        step, times = found
        runs = (step.fw, step.eb, step.gc)
        return [None if run is None else (run.cycles * times, run.energy_nj * times) for run in runs]


class MachinePrices(StepPrices):
    """Prices on any machine, in cycles at BitFusion's clock; NaN nJ if the machine has no figure for energy.

    Args:
        model: a rewritten model.
        batch: samples of a training step.
        machine: the machine.
    """

    def __init__(self, model: FracModel, batch: int, machine: Machine) -> None:
        super().__init__(model, batch)
        self.machine = machine

    def _knows_format(self, op: Op) -> bool:
        return True  # the machine itself leaves out what it has no price for

    def _amounts(self, op: Op, product: Product, choice: Choice) -> Sequence[tuple[float, float] | None] | None:
        step = self.machine.step([op], {op.name: (choice,)}, batch=self.batch).ops.get(op.name)
        if step is None:
            return None
        parts = [step.parts.get(path) for path in PATHS]
        return [None if part is None else (part.seconds * FREQUENCY, _nanojoules(part)) for part in parts]


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


def _nanojoules(part: Price) -> float:
    return math.nan if part.joules is None else part.joules * 1e9


def _sum(parts: Iterable[Sums]) -> Sums:
    return sum(parts, start=np.zeros((len(PATHS), 3)))


def _amount(sums: Sums) -> Amount:
    macs, cycles, nanojoules = sums.sum(axis=0).tolist()
    return Amount(macs, cycles / FREQUENCY, nanojoules / 1e9)


def _by_path(sums: Sums) -> dict[str, Amount]:
    return {path: _amount(sums[index : index + 1]) for index, path in enumerate(PATHS)}


def _plain_paths(paths: dict[str, Amount]) -> dict[str, dict[str, float]]:
    return {path: amount._asdict() for path, amount in paths.items()}
