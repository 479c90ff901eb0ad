"""What a training step of a model would take on a machine, at each precision of its method and in float."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fractrain_fx.config import FracConfig
from fractrain_fx.config.precision import FULL, Precision
from fractrain_fx.hardware.chosen import STEERED, choice_of
from fractrain_fx.hardware.machine import Choice, Floats, Machine, Traffic, Work
from fractrain_fx.hardware.roofline import Roofline
from fractrain_fx.hardware.traffic import traffic_of
from fractrain_fx.nn.cost import OpCost
from fractrain_fx.passes import costed

if TYPE_CHECKING:
    from fractrain_fx.model import FracModel

__all__ = ["PlannedStep", "float_types", "plan_steps", "usual_floats"]

_SLOWEST = 3

_Level = tuple[str, bool, dict[str, tuple[Choice]]]


@dataclass(frozen=True)
class PlannedStep:
    """One row of a plan on a machine.

    ``precision`` is what steered ops run at, as text, or a float type in the rows to compare with; ``native`` tells
    whether the machine has units of just these widths. ``seconds``, ``joules`` and ``float32`` are ``None``, and
    ``bounds`` and ``slowest`` empty, if no op that the method steers has a price. ``joules`` is also ``None`` if no
    figure for energy is known; ``powered`` tells whether it is the board's power times the time, which is an upper
    bound. ``float32`` is the seconds of the same work in float32. ``bounds`` has shares (0..1) of the time by what
    bounds it, ``slowest`` the ops that take longest, with their shares of the time and what bounds them. ``unpriced``
    is work without a price on the machine, which is in no sum.
    """

    machine: str
    batch: int
    precision: str
    native: bool
    seconds: float | None
    joules: float | None
    powered: bool
    float32: float | None
    bounds: dict[str, float]
    slowest: tuple[tuple[str, float, str], ...]
    unpriced: tuple[str, ...]


def plan_steps(model: FracModel, machine: Machine, batch: int) -> list[PlannedStep]:
    """The steps of a model in float, and at each option or stage of its method if all samples took that one.

    Ops that stay float, norms, activation functions and sums are in bfloat16 if a roofline has it (as under autocast).
    The rounding of gates and the gates themselves are not priced. ``model`` is rewritten or planned.
    """
    ops = costed(model.graph_module, model.frac_config)
    work: list[Work] = [*(op for op, _ in ops), *traffic_of(model._state.recording.train)]
    costs = {op.name: cost for op, cost in ops}
    steered = {op.name for op, _ in ops if op.precision.mode in STEERED}
    return [_row(machine, batch, level, work, steered) for level in _levels(model.frac_config, machine, work, costs)]


def _levels(
    config: FracConfig, machine: Machine, work: Sequence[Work], costs: Mapping[str, OpCost]
) -> Iterator[_Level]:
    """Every row's name, whether the machine supports it, and the choice of each op."""
    kinds = float_types(machine)
    for kind in kinds:
        yield kind, machine.supports(FULL, "affine"), {item.name: (Choice(floats=kind),) for item in work}
    floats = usual_floats(machine)
    for level in _precisions(config):
        choices = {item.name: (replace(_choice(item, level, config, costs), floats=floats),) for item in work}
        yield str(level), machine.supports(level, config.format), choices


def float_types(machine: Machine) -> list[Floats]:
    """The types to compare with: float32, and on a roofline tf32 and bfloat16 if it has them."""
    others: tuple[Floats, ...] = ("tf32", "bfloat16")
    return ["float32", *(kind for kind in others if isinstance(machine, Roofline) and kind in machine.peak)]


def usual_floats(machine: Machine) -> Floats:
    """The type of what a method leaves in float: bfloat16 if a roofline has it, as under autocast."""
    return "bfloat16" if "bfloat16" in float_types(machine) else "float32"


def _precisions(config: FracConfig) -> list[Precision]:
    levels = config.gate_options if config.gated else config.precision_stages if config.scheduled else ()
    return [level for level in dict.fromkeys(levels) if not level.skips and not level.is_float]


def _choice(op: Work, level: Precision, config: FracConfig, costs: Mapping[str, OpCost]) -> Choice:
    if isinstance(op, Traffic):
        return Choice(format=config.format)
    if op.precision.mode in STEERED:
        precision = op.precision.at(config, level)
    else:
        precision = op.precision.precision or FULL
    return choice_of(op, costs[op.name], config, precision, op.weight_bits(config))


def _row(machine: Machine, batch: int, level: _Level, work: Sequence[Work], steered: set[str]) -> PlannedStep:
    name, native, choices = level
    cost = machine.step(work, choices, batch=batch)
    priced = [item for item in work if item.name in cost.ops]
    row = PlannedStep(
        machine=machine.name,
        batch=batch,
        precision=name,
        native=native,
        seconds=None,
        joules=None,
        powered=isinstance(machine, Roofline),
        float32=None,
        bounds={},
        slowest=(),
        unpriced=tuple(item.name for item in work if item.name not in cost.ops),
    )
    # The sum over the few ops that stay float would look like the price of a cheap step.
    if steered and steered.isdisjoint(cost.ops):
        return row
    order = sorted(cost.ops, key=lambda op: cost.ops[op].seconds, reverse=True)[:_SLOWEST]
    seconds = max(cost.seconds, 1e-30)
    return replace(
        row,
        seconds=cost.seconds,
        joules=cost.joules,
        float32=machine.step(priced, {item.name: (Choice(),) for item in priced}, batch=batch).seconds,
        bounds=cost.bounds,
        slowest=tuple((op, cost.ops[op].seconds / seconds, str(cost.ops[op].bound)) for op in order),
    )
