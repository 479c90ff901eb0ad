"""The ops, blocks and costs of a rewritten model as a table or as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fractrain_fx.config.targets import scheduled_precision
from fractrain_fx.hardware.catalogue import find_machine
from fractrain_fx.hardware.machine import Machine
from fractrain_fx.hardware.plan import PlannedStep, plan_steps
from fractrain_fx.model import FracModel, rewritten_in
from fractrain_fx.passes import Block, GateSize, Op, controller_size, gate_sizes
from fractrain_fx.passes.analyse.sequence_first import samples_in_sequence
from fractrain_fx.passes.graph.edit import NAMESPACE
from fractrain_fx.passes.graph.tensors import inputs_in_words, shapes_in_words
from fractrain_fx.summary import notebook, text
from fractrain_fx.summary.loud import float_share, loud_line
from fractrain_fx.summary.machines import slowest_lines, step_lines, steps_table
from fractrain_fx.summary.notes import notes_of
from fractrain_fx.summary.rows import Row, tree

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["Summary", "summarize"]


@dataclass(frozen=True)
class Summary:
    """The result, or the plan, of a rewrite.

    Attributes:
        model: class name of the original.
        method: the method of the configuration.
        options: the options of the gates, or the stages of a scheduled method, as text.
        macs: forward MACs of one sample over all counted contractions.
        inputs: the shapes of the example inputs, at which MACs are counted, as text; ``N`` stands for samples.
        blocks: blocks in order.
        ops: ops in order.
        leaves: modules kept as one node, with the reason.
        targets: cp of each stage in per cent (gated methods).
        reachable: lowest and highest cp in per cent (gated methods).
        float_cost: share (0..1) of a training step's cost that float ops take, in the last stage or at the last target;
            0 under method ``float``.
        followed: the precision of scheduled ops at each target, as text (gated methods).
        notes: other facts about the recording, such as a fixed batch size or values that could not be compared.
        loud: one line about what a reader must not miss (much that stays float, is not counted, or is spent on gates;
            samples in another dimension than modules expect); empty for most models. It is printed first.
        steps: what a training step would take on a machine, in float and at each precision of the method.
        parameters, gate_parameters: number of parameters of the original, and of gates with the controller.
        gates: size of each gated block's gate, by the block's name.
        shapes: the shapes of the tensors that enter and leave each block and op, by its name.
        show_ops: whether printing lists every op.
        show_shapes: whether printing lists shapes.
    """

    model: str
    method: str
    options: tuple[str, ...]
    macs: int
    inputs: str
    blocks: tuple[Block, ...]
    ops: tuple[Op, ...]
    leaves: dict[str, str]
    targets: tuple[float, ...]
    reachable: tuple[float, float] | None
    float_cost: float
    parameters: int
    gate_parameters: int
    gates: dict[str, GateSize] = field(default_factory=dict)
    followed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    loud: str = ""
    shapes: dict[str, str] = field(default_factory=dict)
    steps: tuple[PlannedStep, ...] = ()
    show_ops: bool = False
    show_shapes: bool = False

    def share(self, mode: str) -> float:
        """Share (0..1) of the MACs that are ``gated``, ``scheduled``, ``pinned`` or ``float``."""
        return sum(op.macs or 0 for op in self.ops if op.precision.mode == mode) / max(self.macs, 1)

    @property
    def uncounted(self) -> tuple[Op, ...]:
        """Ops whose cost no formula counts."""
        return tuple(op for op in self.ops if op.macs is None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for programs."""
        plain = asdict(self)
        gates = plain.pop("gates")
        del plain["show_ops"], plain["show_shapes"]
        for block in plain["blocks"]:
            block["share"] = block["macs"] / max(self.macs, 1)
            block["gate"] = gates.get(block["name"])
        for op, source in zip(plain["ops"], self.ops, strict=True):
            decision = source.precision
            op["precision"] = {
                "mode": decision.mode,
                "reason": decision.reason,
                "bits": decision.bits,
            }
        plain["shares"] = {mode: self.share(mode) for mode in ("gated", "scheduled", "pinned", "float")}
        return plain

    def rows(self) -> list[Row]:
        """Rows of blocks (and of ops with ``show_ops``), nested by module path."""
        shapes = self.shapes if self.show_shapes else {}
        return tree(self.blocks, self.ops, self.gates, self.options, shapes, show_ops=self.show_ops)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=text.columns_or(120), no_color=True)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        if self.loud:
            yield Text(self.loud, style=text.LOUD)
        yield text.table(self._title, self.rows(), options.max_width)
        yield from self._notes()
        if self.steps:
            yield steps_table(self.steps, options.max_width)
            if options.max_width < text.WIDE:
                yield from slowest_lines(self.steps)
            yield from self._left_out()

    def _repr_html_(self) -> str:
        lines = [*self._notes(), *step_lines(self.steps), *self._left_out()]
        return notebook.table(self._title, self.rows(), lines, self.loud)

    @property
    def _title(self) -> str:
        return f"{self.model}, method {self.method}"

    def _notes(self) -> Iterator[str]:
        shares = ", ".join(
            f"{100 * self.share(mode):.1f} % {mode}"
            for mode in ("gated", "scheduled", "pinned", "float")
            if self.share(mode)
        )
        uncounted = f" ({len(self.uncounted)} uncounted, in no share)" if self.uncounted else ""
        counts = f"{len(self.ops)} contractions{uncounted}, {len(self.blocks)} blocks"
        sizes = f" ({self.inputs})" if self.inputs else ""
        yield f"{self.macs:,} forward MACs a sample{sizes}: {shares}; {counts}"
        if self.float_cost:
            last = (
                "at the last target" if self.targets else "in the last stage" if len(self.options) > 1 else "of a step"
            )
            yield f"ops that stay float take {100 * self.float_cost:.1f} % of the cost {last}"
        if self.options:
            yield f"precisions: {', '.join(self.options)}"
        if self.reachable:
            low, high = self.reachable
            targets = " / ".join(f"{target:.2f} %" for target in self.targets)
            yield f"target cp by stage: {targets} of full precision (the gates reach {low:.2f} % to {high:.2f} %)"
        if self.followed and self.share("scheduled"):
            yield f"scheduled, since no gate can choose: {' / '.join(self.followed)} at these targets, part of cp"
        if self.gate_parameters:
            macs = sum(gate.macs for gate in self.gates.values())
            more = f"{macs:,} MACs a sample ({100 * macs / max(self.macs, 1):.3f} %)"
            yield f"gates add {self.gate_parameters:,} parameters to {self.parameters:,}, and {more}"
        for path, reason in self.leaves.items():
            yield f"kept as one node: {path}: {reason}"
        yield from self.notes

    def _left_out(self) -> Iterator[str]:
        """What the steps on a machine do not hold."""
        if any(not step.native and step.seconds is not None for step in self.steps):
            yield "* no units of just these widths: computed at the next wider type (docs/reference/machines.md)"
        if any(step.joules is not None and step.powered for step in self.steps):
            yield "J: the board's power times the time, an upper bound"
        if unpriced := {name: None for step in reversed(self.steps) for name in step.unpriced}:
            names = ", ".join(list(unpriced)[:3])
            yield f"without a price on {self.steps[0].machine}: {len(unpriced)} calls, such as {names}"


def summarize(
    model: FracModel,
    *,
    ops: bool = False,
    shapes: bool = False,
    machine: Machine | str | None = None,
    batch: int = 128,
) -> Summary:
    """The summary of a rewritten model: print it, or take ``to_dict()``.

    Args:
        model: a rewritten model, also inside a wrapper; ``plan`` takes models that were not rewritten.
        ops: whether printing lists every op instead of every block.
        shapes: whether printing lists the shapes of every tensor that enters or leaves a block or op.
        machine: a machine, or its name, on which to compute the time and energy of a training step
            (docs/reference/machines.md).
        batch: samples of that step.

    Raises:
        InputError: the model was not rewritten.
        ConfigError: there is no machine of that name.
    """
    model = rewritten_in(model, "summarize")
    config = model.frac_config
    graph_module = model._state.recording.train
    gates = gate_sizes(graph_module, config)
    options = config.gate_options if config.gated else config.precision_stages if config.scheduled else ()
    hardware = None if machine is None else find_machine(machine)
    float_cost = 0.0 if config.method == "float" else float_share(model)
    return Summary(
        model=type(model._state.original).__name__,
        method=config.method,
        options=tuple(str(option) for option in options),
        macs=model.macs,
        inputs=inputs_in_words(graph_module),
        blocks=tuple(model.blocks),
        ops=tuple(model.ops),
        leaves=dict(model.leaves),
        targets=model.targets,
        reachable=model.reachable,
        float_cost=float_cost,
        parameters=sum(p.numel() for name, p in model.named_parameters() if not name.startswith(f"{NAMESPACE}.")),
        gate_parameters=controller_size(config).parameters + sum(g.parameters for g in gates.values()) if gates else 0,
        gates=gates,
        followed=tuple(str(scheduled_precision(config, target)) for target in model.targets),
        notes=tuple(notes_of(model)),
        loud=loud_line(
            model.ops, sum(gate.macs for gate in gates.values()), samples_in_sequence(graph_module), float_cost
        ),
        shapes=shapes_in_words(graph_module),
        steps=() if hardware is None else tuple(plan_steps(model, hardware, batch)),
        show_ops=ops,
        show_shapes=shapes,
    )
