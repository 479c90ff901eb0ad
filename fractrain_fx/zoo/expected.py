"""Compute the cost of a run of the paper from its settings alone, as the paper counts.

The paper counts every layer at the stated bits, also stem and head, and three equally large products for each layer.
The length of stages and the mix of options are only known after a run. This module assumes stages of equal length, and
the two options whose costs enclose the target (among those that BitFusion multiplies in one pass, if they suffice).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fractrain_fx.config import Cyclic, FracConfig, Manual, Pin
from fractrain_fx.config.precision import Precision
from fractrain_fx.engine.schedules import plan_stages
from fractrain_fx.errors import ConfigError
from fractrain_fx.hardware.bitfusion import NATIVE_BITS
from fractrain_fx.hardware.machine import Machine
from fractrain_fx.hardware.run_cost import StepPrices, Sums
from fractrain_fx.model import FracModel
from fractrain_fx.nn.cost import OpCost
from fractrain_fx.passes import Op
from fractrain_fx.training.data import Task, stand_in
from fractrain_fx.training.models import build_model
from fractrain_fx.training.settings import RunSettings

__all__ = ["Expected", "expected", "mix_of"]

Mix = list[tuple[float, Precision]]

# Task, outputs of the head and training samples of the paper's data sets. CIFAR-100 is counted with ten
# classes (the other classes are 0.007 % of ResNet-38). A language model's head does not count.
_DATA: dict[str, tuple[Task, int, int | None]] = {
    "cifar10": ("classification", 10, 50_000),
    "cifar100": ("classification", 10, 50_000),
    "imagenet": ("classification", 1000, 1_281_167),
    "wikitext103": ("language", 1000, None),
}


@dataclass(frozen=True)
class Expected:
    """Computed costs of a run.

    Attributes:
        forward_macs: M, forward MACs of one sample that the paper counts.
        cp: share 0..1 of full-precision training, with every layer at its stated bits.
        samples: training samples of the whole run.
        seconds, joules: cost of one sample on the machine; NaN joules if the machine has no figure for energy.
    """

    forward_macs: int
    cp: float
    samples: int
    seconds: float
    joules: float

    @property
    def macs(self) -> float:
        """Cost of the whole run in full-precision MACs: ``3 M cp`` a sample, with ``M`` the forward MACs."""
        return self.macs_of(self.samples)

    def macs_of(self, samples: float) -> float:
        """Cost of a number of samples."""
        return 3 * self.forward_macs * self.cp * samples

    def samples_of(self, macs: float) -> float:
        """The number of samples that cost so many MACs. The paper's printed MACs end at the best evaluation."""
        return macs / self.macs_of(1)


def expected(settings: RunSettings, machine: Machine | None = None) -> Expected:
    """The cost of a run with these settings, on BitFusion unless another machine is given.

    Raises:
        ConfigError: the size of the data set is not known in advance, or no mix of options reaches a target.
    """
    if settings.data not in _DATA:
        raise ConfigError(f"data={settings.data!r} is not one of the paper's: {', '.join(_DATA)}")
    task, classes, _ = _DATA[settings.data]
    model = _recorded(settings.model, task, classes, settings.image_size, settings.block_length, settings.frac.pins)
    prices = StepPrices(model, settings.train.batch_size, machine)
    samples = training_samples(settings)
    # For language only the linear layers of the trunk count, without the products of attention and the head.
    counted = [
        (op, cost)
        for op, cost in prices.ops
        if task == "classification" or (op.kind == "linear" and op.precision.mode != "float")
    ]
    skippable = {block.name for block in prices.model.blocks if block.skip is not None}
    sums = np.zeros((3, 3))
    for share, mix, weight_bits in _levels(settings):
        for op, cost in counted:
            sums += share * _spent(prices, op, cost, mix, weight_bits, op.block in skippable)
    full = sum(sum(cost.macs) for _, cost in counted)
    macs, seconds, joules = sums.sum(axis=0).tolist()
    return Expected(sum(op.macs or 0 for op, _ in counted), macs / full, samples, seconds, joules)


def training_samples(settings: RunSettings) -> int:
    """The number of samples in the loop: whole batches of each epoch, or of each iteration."""
    loop = settings.train
    steps = loop.epoch_steps and loop.epochs * loop.epoch_steps
    steps = steps if loop.iterations is None else loop.iterations
    if steps is not None:
        return steps * loop.batch_size * loop.accumulate
    size = _DATA[settings.data][2]
    if size is None:
        raise ConfigError(f"the number of samples of {settings.data} depends on its files: give iterations")
    return loop.epochs * (size // loop.batch_size) * loop.batch_size


def mix_of(target: float, options: Sequence[Precision], weight_bits: int) -> Mix:
    """Shares of the two options whose costs enclose a target cp (per cent) most closely; their mean cost is the target.

    Options that BitFusion multiplies natively come first; wider ones are only used if those cost too little.

    Raises:
        ConfigError: the target is outside the range of the options.
    """
    one = OpCost((1, 1, 1))
    costs = {option: 100 * sum(one.spent(option, weight_bits)) / 3 for option in options}
    native = [option for option in options if max(option.fw, option.bw) <= NATIVE_BITS]
    for usable in (native, list(options)):
        below = [option for option in usable if costs[option] <= target]
        above = [option for option in usable if costs[option] >= target]
        if below and above:
            low, high = max(below, key=costs.__getitem__), min(above, key=costs.__getitem__)
            gap = costs[high] - costs[low]
            share = (target - costs[low]) / gap if gap else 0.0
            return [(1 - share, low), (share, high)]
    raise ConfigError(f"no mix of {', '.join(map(str, options))} costs {target:g} % with {weight_bits}-bit weights")


def _levels(settings: RunSettings) -> list[tuple[float, Mix, int | None]]:
    """Shares of the run's samples, each with its mix of options and its weight bits."""
    config = settings.frac
    if config.method == "float":
        raise ConfigError("a float run has no precision to compute a cost from")
    if config.scheduled:
        stages = _stages(config.precision_stages, settings)
        return [(share, [(1.0, level)], None) for share, level in stages if isinstance(level, Precision)]
    if config.targets is None:
        raise ConfigError(f"method={config.method!r} needs targets for its cost to be computed beforehand")
    targets = config.targets.per_cent if config.method == "fractrain" else config.targets.per_cent[-1:]
    options, bits = config.gate_options, config.gate_weight_bits
    return [
        (share, mix_of(target, options, bits), bits)
        for share, target in _stages(targets, settings)
        if isinstance(target, float)
    ]


def _stages(
    levels: tuple[Precision, ...] | tuple[float, ...], settings: RunSettings
) -> list[tuple[float, Precision | float]]:
    """Each level with its share of the run; stages of an automatic schedule count as equally long."""
    epochs = _epochs(settings)
    plan = plan_stages(settings.frac.replace(**{"run.length": epochs}), levels)
    if not isinstance(settings.frac.schedule, Manual | Cyclic):
        return [(1 / len(plan.levels), level) for level in plan.levels]
    stages = [0, *(plan.schedule.update(0.0) for _ in range(epochs - 1))]
    return [(stages.count(stage) / epochs, level) for stage, level in enumerate(plan.levels)]


def _epochs(settings: RunSettings) -> int:
    size = _DATA[settings.data][2]
    if settings.train.iterations is None or size is None:
        return settings.train.epochs
    return math.ceil(training_samples(settings) / size)


def _spent(prices: StepPrices, op: Op, cost: OpCost, mix: Mix, weight_bits: int | None, skippable: bool) -> Sums:
    if op.precision.mode == "pinned" and op.precision.precision is not None:
        return prices.of(op, cost, op.precision.precision)
    computing = [option for _, option in mix if not option.skips]
    sums = np.zeros((3, 3))
    for share, option in mix:
        # An op that cannot be skipped takes the cheapest option that computes (docs/background/architecture.md).
        taken = option if (skippable and not op.skip_path) or not option.skips else computing[0]
        sums += share * prices.of(op, cost, taken, weight_bits)
    return sums


@lru_cache(maxsize=16)
def _recorded(
    name: str, task: Task, classes: int, image_size: int | None, block_length: int, pins: tuple[Pin, ...]
) -> FracModel:
    """A model, recorded once for all its recipes, because its products do not depend on the method."""
    from fractrain_fx.api import fractrainify

    built = build_model(name, stand_in(task, classes, block_length=block_length), image_size=image_size)
    args, kwargs = built.examples()
    config = FracConfig(method="static", pins=pins)
    return fractrainify(built.model, config=config, example_inputs=args, example_kwargs=kwargs, check=False)
