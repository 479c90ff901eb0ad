"""The table that says what each block and op costs, and why it has its precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fractrain_fx.model import FracModel
from fractrain_fx.passes import Block, Op, fixed_batch

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

__all__ = ["Summary", "summarize"]


@dataclass(frozen=True)
class Summary:
    """What was (or would be) rewritten.

    Attributes:
        model: class name of the original.
        method: of the configuration.
        options: what gates choose from, or the stages of a scheduled method, as text.
        macs: forward MACs of one sample over all counted contractions.
        blocks: in order.
        ops: in order.
        leaves: modules recorded as a whole, with the reason.
        targets: cp of each stage in per cent (gated methods).
        reachable: lowest and highest cp in per cent (gated methods).
        notes: what to know of the recording besides: values that could not be compared, a batch size that is fixed.
        parameters, gate_parameters: counts, of the original and of what gates add.
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
    notes: tuple[str, ...] = ()
    show_ops: bool = False

    def share(self, mode: str) -> float:
        """Share (0..1) of the MACs that are ``gated``, ``scheduled``, ``pinned`` or ``float``."""
        return sum(op.macs or 0 for op in self.ops if op.precision.mode == mode) / max(self.macs, 1)

    @property
    def uncounted(self) -> tuple[Op, ...]:
        """Ops whose cost no formula gives."""
        return tuple(op for op in self.ops if op.macs is None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for programs."""
        plain = asdict(self)
        del plain["show_ops"]
        for op, given in zip(plain["ops"], self.ops, strict=True):
            decision = given.precision
            op["precision"] = {
                "mode": decision.mode,
                "reason": decision.reason,
                "bits": str(decision.precision) if decision.precision else None,
            }
        plain["shares"] = {mode: self.share(mode) for mode in ("gated", "scheduled", "pinned", "float")}
        return plain

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=120, no_color=True)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._op_table() if self.show_ops else self._block_table()
        yield from self._notes()

    def _block_table(self) -> Table:
        from rich.table import Table

        table = Table(title=f"{self.model}, method {self.method}", title_justify="left")
        for column, justify in (("block", "left"), ("skip", "left"), ("ops", "right"), ("MACs", "right")):
            table.add_column(column, justify=justify)  # type: ignore[arg-type]
        table.add_column("share", justify="right")
        table.add_column("precision")
        by_name = {op.name: op for op in self.ops}
        for block in self.blocks:
            modes = _modes([by_name[name] for name in block.ops])
            macs, share = f"{block.macs:,}", self._part(block.macs)
            table.add_row(block.name, block.skip or "-", str(len(block.ops)), macs, share, modes)
        for op in self.uncounted:
            table.add_row(op.name, "-", "1", "uncounted", "", str(op.precision))
        return table

    def _op_table(self) -> Table:
        from rich.table import Table

        table = Table(title=f"{self.model}, method {self.method}: every contraction", title_justify="left")
        for column in ("op", "kind", "block", "MACs", "share", "precision"):
            table.add_column(column, justify="right" if column in ("MACs", "share") else "left")
        for op in self.ops:
            macs = "uncounted" if op.macs is None else f"{op.macs:,}"
            share = "" if op.macs is None else self._part(op.macs)
            table.add_row(op.name, op.kind, op.block or "-", macs, share, str(op.precision))
        return table

    def _part(self, macs: int) -> str:
        return f"{100 * macs / max(self.macs, 1):.1f} %"

    def _notes(self) -> Iterator[str]:
        shares = ", ".join(
            f"{100 * self.share(mode):.1f} % {mode}"
            for mode in ("gated", "scheduled", "pinned", "float")
            if self.share(mode)
        )
        yield f"{self.macs:,} forward MACs a sample: {shares}; {len(self.ops)} contractions, {len(self.blocks)} blocks"
        if self.options:
            yield f"precisions: {', '.join(self.options)}"
        if self.reachable:
            low, high = self.reachable
            targets = " / ".join(f"{target:.3g}" for target in self.targets)
            yield f"target cp: {targets} % (the gates reach {low:.2f} to {high:.2f} %)"
        if self.gate_parameters:
            yield f"gates add {self.gate_parameters:,} parameters to {self.parameters:,}"
        for path, reason in self.leaves.items():
            yield f"recorded as a whole: {path}: {reason}"
        yield from self.notes


def summarize(model: FracModel, *, ops: bool = False) -> Summary:
    """What a rewritten model consists of: print it, or take ``to_dict()``.

    Args:
        model: from ``fractrainify``.
        ops: whether printing lists every op instead of every block.
    """
    gates = [p.numel() for name, p in model.named_parameters() if name.startswith("frac.")]
    config = model.config
    options = config.gate_options if config.gated else config.precision_stages if config.scheduled else ()
    return Summary(
        model=type(model.restore()).__name__,
        method=config.method,
        options=tuple(str(option) for option in options),
        macs=model.macs,
        blocks=tuple(model.blocks),
        ops=tuple(model.ops),
        leaves=dict(model.leaves),
        targets=model.targets,
        reachable=model.reachable,
        parameters=sum(p.numel() for p in model.parameters()) - sum(gates),
        gate_parameters=sum(gates),
        notes=tuple(_notes(model)),
        show_ops=ops,
    )


def _notes(model: FracModel) -> Iterator[str]:
    if not model.checked:
        yield "the recording was not compared with the model: check=False, or tensors without data (meta)"
    if fixed_batch(model.graph_module):
        yield (
            "runs at one batch size only: the MACs of a sample are those of the recorded call over its batch size"
            + (", and the gates choose once for the whole batch" if model.config.gated else "")
        )


def _modes(ops: list[Op]) -> str:
    """The precisions within a block in words: one where all agree, counts where they differ."""
    words: dict[str, int] = {}
    for op in ops:
        word = op.precision.mode if op.precision.mode in ("gated", "scheduled") else str(op.precision)
        words[word] = words.get(word, 0) + 1
    if len(words) == 1:
        return next(iter(words))
    return ", ".join(f"{count} {word}" for word, count in words.items())
