"""The ops, blocks and costs of a rewritten model as a table or as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fractrain_fx.config import Torchao
from fractrain_fx.errors import InputError
from fractrain_fx.execution.int8.timing import lacks_products
from fractrain_fx.execution.torchao.devices import refusal, slow
from fractrain_fx.execution.torchao.linear import NUMERICS
from fractrain_fx.model import FracModel
from fractrain_fx.passes import (
    Block,
    GateSize,
    Op,
    controller_size,
    fixed_batch,
    gate_sizes,
    not_on_int8,
    not_on_torchao,
    undispatched,
)
from fractrain_fx.passes.graph.edit import NAMESPACE
from fractrain_fx.summary import notebook, text
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
        blocks: blocks in order.
        ops: ops in order.
        leaves: modules kept as one node, with the reason.
        targets: cp of each stage in per cent (gated methods).
        reachable: lowest and highest cp in per cent (gated methods).
        notes: other facts about the recording, such as a fixed batch size or values that could not be compared.
        parameters, gate_parameters: number of parameters of the original, and of gates with the controller.
        gates: size of each gated block's gate, by the block's name.
        show_ops: whether printing lists every op.
    """

    model: str
    method: str
    options: tuple[str, ...]
    macs: int
    blocks: tuple[Block, ...]
    ops: tuple[Op, ...]
    leaves: dict[str, str]
    targets: tuple[float, ...]
    reachable: tuple[float, float] | None
    parameters: int
    gate_parameters: int
    gates: dict[str, GateSize] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    show_ops: bool = False

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
        del plain["show_ops"]
        for block in plain["blocks"]:
            block["share"] = block["macs"] / max(self.macs, 1)
            block["gate"] = gates.get(block["name"])
        for op, given in zip(plain["ops"], self.ops, strict=True):
            decision = given.precision
            op["precision"] = {
                "mode": decision.mode,
                "reason": decision.reason,
                "bits": str(decision.precision) if decision.precision else None,
            }
        plain["shares"] = {mode: self.share(mode) for mode in ("gated", "scheduled", "pinned", "float")}
        return plain

    def rows(self) -> list[Row]:
        """Rows of blocks (and of ops with ``show_ops``), nested by module path."""
        return tree(self.blocks, self.ops, self.gates, self.options, show_ops=self.show_ops)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=text.columns_or(120), no_color=True)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield text.table(self._title, self.rows(), options.max_width)
        yield from self._notes()

    def _repr_html_(self) -> str:
        return notebook.table(self._title, self.rows(), list(self._notes()))

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
        yield f"{self.macs:,} forward MACs a sample: {shares}; {counts}"
        if self.options:
            yield f"precisions: {', '.join(self.options)}"
        if self.reachable:
            low, high = self.reachable
            targets = " / ".join(f"{target:.2f} %" for target in self.targets)
            yield f"target cp by stage: {targets} of full precision (the gates reach {low:.2f} % to {high:.2f} %)"
        if self.gate_parameters:
            macs = sum(gate.macs for gate in self.gates.values())
            more = f"{macs:,} MACs a sample ({100 * macs / max(self.macs, 1):.3f} %)"
            yield f"gates add {self.gate_parameters:,} parameters to {self.parameters:,}, and {more}"
        for path, reason in self.leaves.items():
            yield f"kept as one node: {path}: {reason}"
        yield from self.notes


def summarize(model: FracModel, *, ops: bool = False) -> Summary:
    """The summary of a rewritten model: print it, or take ``to_dict()``.

    Args:
        model: a rewritten model.
        ops: whether printing lists every op instead of every block.

    Raises:
        InputError: the model was not rewritten.
    """
    if not isinstance(model, FracModel):
        raise InputError(
            f"summarize takes a rewritten model, not a {type(model).__name__}: write summarize(fractrainify(model)), "
            "or plan(model), which rewrites nothing"
        )
    config = model.frac_config
    gates = gate_sizes(model._state.recording.train, config)
    options = config.gate_options if config.gated else config.precision_stages if config.scheduled else ()
    return Summary(
        model=type(model._state.original).__name__,
        method=config.method,
        options=tuple(str(option) for option in options),
        macs=model.macs,
        blocks=tuple(model.blocks),
        ops=tuple(model.ops),
        leaves=dict(model.leaves),
        targets=model.targets,
        reachable=model.reachable,
        parameters=sum(p.numel() for name, p in model.named_parameters() if not name.startswith(f"{NAMESPACE}.")),
        gate_parameters=controller_size(config).parameters + sum(g.parameters for g in gates.values()) if gates else 0,
        gates=gates,
        notes=tuple(_notes(model)),
        show_ops=ops,
    )


def _notes(model: FracModel) -> Iterator[str]:
    if not model.checked:
        yield "the recording was not compared with the model: check=False, or tensors without data (meta)"
    if fixed_batch(model.graph_module):
        yield (
            "runs at one batch size only: the MACs of a sample are those of the recorded call over its batch size"
            + (", and the gates choose once for the whole batch" if model.frac_config.gated else "")
        )
    yield from _tied(model)
    device = next(model.parameters()).device.type
    if model.frac_config.rounding == "compiled" and device != "cpu":
        yield f"rounding='compiled' changes nothing here: it is for CPUs, and this model is on {device!r}"
    if model.frac_config.dispatches:
        yield from _dispatched(model)
    if model.frac_config.lowers:
        yield from _lowered(model)
    if model.frac_config.torchao is not None:
        yield from _swapped(model, model.frac_config.torchao)


def _tied(model: FracModel) -> Iterator[str]:
    recordings = model._state.variants
    ties = {str(guard): guard for guards in recordings.first.recording.guards.values() for guard in guards.ties}
    for condition, guard in ties.items():
        yield f"recorded for {condition}: {guard.place}; for calls that do not meet it the model is recorded again"
    rest = len(model.guards) - len(ties)
    if rest:
        yield f"{rest} more conditions on sizes held in every call so far: model.guards lists them"


def _dispatched(model: FracModel) -> Iterator[str]:
    kept = undispatched(model._state.recording.train)
    skippable = sum(block.gated and block.skip is not None for block in model.blocks)
    if skippable:
        yield f"{skippable - len(kept)} of {skippable} blocks with a skip path leave out the samples that skip them"
    else:
        yield "no block of this model has a skip path, so execution='auto' changes nothing"
    for name, reason in kept.items():
        yield f"runs for all samples, also those that skip it: {name}: {reason}"


def _lowered(model: FracModel) -> Iterator[str]:
    kept = not_on_int8(model._state.recording.train, model.frac_config)
    quantized = len(model.kernels())
    device, compiled = next(model.parameters()).device, model.frac_config.rounding == "compiled"
    lacking = lacks_products(device, compiled=compiled) if model.frac_config.kernels == "auto" else None
    here = f", but not here: {lacking}" if lacking else ""
    yield f"{quantized - len(kept)} of {quantized} quantized ops may multiply on int8{here}"
    yield from _by_reason("multiplies in float", kept)


def _swapped(model: FracModel, kind: Torchao) -> Iterator[str]:
    kept = not_on_torchao(model._state.recording.train, model.frac_config)
    quantized = len(model.kernels())
    device = next(model.parameters()).device
    yield f"{quantized - len(kept)} of {quantized} quantized ops are computed by {NUMERICS[kind]}"
    yield "costs are those of FW-8/BW-8, also for ops that torchao computes"
    if (reason := refusal(kind, device)) is not None:
        yield f"cannot run here: {reason}"
    elif (reason := slow(kind, device)) is not None:
        yield f"saves no time here: {reason}"
    yield from _by_reason("simulated in float", kept)


def _by_reason(what: str, kept: dict[str, str]) -> Iterator[str]:
    """A line for each reason, with some of its ops."""
    for reason in dict.fromkeys(kept.values()):
        names = [name for name, each in kept.items() if each == reason]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"{what}: {', '.join(names[:3])}{more}: {reason}"
