"""What a whole run would take on named machines, at the precisions that it took.

A run is priced as one mean step: each op with the shares of all its samples that trained at each precision, each as if
the whole batch had. Samples that skip a block leave out its other work too, if a branch can run for a part of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fractrain_fx.hardware.catalogue import MACHINES, find_machine
from fractrain_fx.hardware.chosen import STEERED, by_stage, choice_of, taken
from fractrain_fx.hardware.machine import Choice, Floats, Machine, StepCost, Work
from fractrain_fx.hardware.plan import float_types, usual_floats
from fractrain_fx.hardware.traffic import traffic_of
from fractrain_fx.passes import Op, costed
from fractrain_fx.passes.graph.branches import ends_of, part_of

if TYPE_CHECKING:
    from fractrain_fx.engine.rows import EpochRow
    from fractrain_fx.model import FracModel

__all__ = ["PRICED", "MachineRun", "price_run"]

PRICED = tuple(name for name in MACHINES if name != "cpu")
"""The machines that every run is priced on. This processor would have to be measured, on which the run itself ran."""


@dataclass(frozen=True)
class MachineRun:
    """The forward and backward passes of a run's training on a machine, without optimizer, gates and evaluation.

    ``seconds`` and ``joules`` are of the whole run; ``None`` if the machine has no price for any op that the method
    steers, and joules also if no figure for energy is known. ``float32`` and ``bfloat16`` are seconds of the same steps
    in these types, nothing skipped; ``None`` without the type. ``bounds`` has shares (0..1) of ``seconds`` by what
    bounds them. For the precisions ``wider`` the machine has no units, and computes in a wider type. Contractions that
    are ``unpriced`` are in no number here; ``contractions_only`` tells that the machine has no price for norms,
    activation functions and sums.
    """

    machine: str
    seconds: float | None = None
    joules: float | None = None
    float32: float | None = None
    bfloat16: float | None = None
    float32_joules: float | None = None
    bfloat16_joules: float | None = None
    bounds: Mapping[str, float] = field(default_factory=dict)
    wider: tuple[str, ...] = ()
    unpriced: tuple[str, ...] = ()
    contractions_only: bool = False

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MachineRun:
        """Read what ``dataclasses.asdict`` gave, also from JSON."""
        return cls(**{**values, "wider": tuple(values["wider"]), "unpriced": tuple(values["unpriced"])})


def price_run(
    model: FracModel, rows: Iterable[EpochRow], batch: int, machines: Sequence[str | Machine] = PRICED
) -> tuple[MachineRun, ...]:
    """Price a ledger's epochs on several machines; empty without an epoch.

    What stays float is in bfloat16 if the machine has it, as in ``plan``; a run of ``method="float"`` is in float32.
    ``batch`` is the number of samples of a training step. Samples have the example's sizes.
    """
    stages = list(by_stage(rows).values())
    run = _Run(model, stages, batch) if stages else None
    return tuple(run.on(find_machine(machine)) for machine in machines) if run is not None else ()


class _Run:
    """The work of a model, and the choices of a mean step over some stages."""

    def __init__(self, model: FracModel, stages: Sequence[EpochRow], batch: int) -> None:
        config, ops = model.frac_config, costed(model.graph_module, model.frac_config)
        samples = sum(row.samples for row in stages)
        traffic = traffic_of(model._state.recording.train)
        self._batch, self._steps = batch, samples / batch
        self._rounds = config.method != "float"
        self._work: list[Work] = [*(op for op, _ in ops), *traffic]
        self._names = [op.name for op in model.ops]
        self._steered = {op.name for op, _ in ops if op.precision.mode in STEERED} or {op.name for op, _ in ops}
        self._shares: dict[str, dict[Choice, float]] = {}
        for op, cost in ops:
            mix = self._shares[op.name] = {}
            for row in stages:
                for share, precision, bits in taken(model, op, row):
                    choice = choice_of(op, cost, config, precision, bits)
                    mix[choice] = mix.get(choice, 0.0) + share * row.samples / samples
        skipped = _skipped(model, stages, samples)
        for item in traffic:
            self._shares[item.name] = {Choice(format=config.format): 1 - skipped.get(item.name, 0.0)}

    def on(self, machine: Machine) -> MachineRun:
        """The run on a machine."""
        floats = usual_floats(machine) if self._rounds else "float32"
        choices = {
            name: tuple(replace(choice, share=share, floats=floats) for choice, share in mix.items())
            for name, mix in self._shares.items()
        }
        cost = machine.step(self._work, choices, batch=self._batch)
        unpriced = tuple(name for name in self._names if name not in cost.ops)
        if self._steered.isdisjoint(cost.ops):
            return MachineRun(machine.name, unpriced=unpriced)
        priced = [item for item in self._work if item.name in cost.ops]
        seconds, joules = self._whole(cost)
        float32, float32_joules = self._in("float32", machine, priced)
        bfloat16, bfloat16_joules = self._in("bfloat16", machine, priced)
        return MachineRun(
            machine.name,
            seconds,
            joules,
            float32,
            bfloat16,
            float32_joules,
            bfloat16_joules,
            cost.bounds,
            self._wider(machine),
            unpriced,
            all(isinstance(item, Op) or not cost.ops[item.name].parts for item in priced),
        )

    def _in(self, kind: Floats, machine: Machine, work: Sequence[Work]) -> tuple[float | None, float | None]:
        """Seconds and joules of some work in a float type; ``None`` if the machine does not have it."""
        if kind not in float_types(machine):
            return None, None
        choices = {item.name: (Choice(floats=kind),) for item in work}
        return self._whole(machine.step(work, choices, batch=self._batch))

    def _whole(self, step: StepCost) -> tuple[float, float | None]:
        return step.seconds * self._steps, None if step.joules is None else step.joules * self._steps

    def _wider(self, machine: Machine) -> tuple[str, ...]:
        rounded = {
            (choice.precision, choice.format)
            for mix in self._shares.values()
            for choice, share in mix.items()
            if share and not choice.precision.skips and not choice.precision.is_float
        }
        lacking = {precision for precision, name in rounded if not machine.supports(precision, name)}
        return tuple(str(precision) for precision in sorted(lacking, key=lambda p: (p.fw, p.bw)))


def _skipped(model: FracModel, stages: Sequence[EpochRow], samples: int) -> dict[str, float]:
    """The share of samples that left out a node with the branch that it belongs to, by the node's name."""
    graph_module = model._state.recording.train
    skips = [index for index, option in enumerate(model.frac_config.gate_options) if option.skips]
    shares: dict[str, float] = {}
    for end, block in ends_of(graph_module.graph).items():
        part = part_of(graph_module, block, end)
        if isinstance(part, str):
            continue
        share = sum(row.samples * row.options[block.name][index] for row in stages for index in skips) / samples
        shares |= {node.name: max(share, shares.get(node.name, 0.0)) for node in part.nodes}
    return shares
