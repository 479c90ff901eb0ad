"""The row of an epoch, and what rows of several epochs or parts say together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from fractrain_fx.config.kinds import check_kinds
from fractrain_fx.engine.steered import show_level

__all__ = [
    "EpochRow",
    "beside_shares",
    "cost_share",
    "joined_parts",
    "pure_rows",
    "stages_text",
    "table",
    "turning_rows",
]


@dataclass(frozen=True)
class EpochRow:
    """One epoch. Costs are shares 0..1 of full-precision training on its samples (paper 4.1).

    Attributes:
        epoch: counted from 1.
        stage: the stage during the epoch, counted from 0; if it changed, the stage at the epoch's end.
        level: the level of that stage: a precision, a target cp in per cent, or ``float``.
        loss: mean task loss, or ``None`` if it was not finite or all batches were empty.
        cp: over the gated (or scheduled) ops.
        cp_total: over every contraction of the model.
        fw, eb, gc: the cost of forward pass, error back-propagation and gradient computation, each as a share of its
            own cost at full precision, over the same ops as ``cp``.
        samples: training samples seen in this epoch.
        options: for each block, the share of samples that chose each option.
        uncounted: number of contractions that no formula counts. No share includes them.
        relative_macs: full-precision MACs of training on a sample, relative to those for the example's sizes with
            nothing frozen.
        steered: the share of these that the ops of ``cp`` take.
        step: optimizer steps of the run until the epoch's end; 0 if the loop does not say when they end.
        tokens: tokens of the run until then, if stages are counted in tokens.
        parts: the parts of the epoch, a row for each stage, if the stage changed in it.
    """

    epoch: int
    stage: int
    level: str
    loss: float | None
    cp: float
    cp_total: float
    fw: float
    eb: float
    gc: float
    samples: int
    options: dict[str, tuple[float, ...]]
    uncounted: int = 0
    relative_macs: float = 1.0
    steered: float = 1.0
    step: int = 0
    tokens: int = 0
    parts: tuple[EpochRow, ...] = ()

    def __str__(self) -> str:
        """The epoch in one line."""
        return (
            f"epoch {self.epoch:3d}  stage {self.stage + 1} ({show_level(self.level)})  loss {self.loss_text}  "
            f"cp {100 * self.cp:.2f} %  cp_total {100 * self.cp_total:.2f} %{beside_shares(self.uncounted)}"
        )

    @property
    def loss_text(self) -> str:
        """The mean task loss in words."""
        if not self.samples:
            return "of no sample"
        return "not finite" if self.loss is None else f"{self.loss:.4f}"

    @property
    def full_samples(self) -> float:
        """The number of samples of the example's sizes, with nothing frozen, that cost as much at full precision."""
        return self.samples * self.relative_macs

    @property
    def pure(self) -> tuple[EpochRow, ...]:
        """Rows of one stage each: the parts, or this row itself."""
        return self.parts or (self,)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EpochRow:
        """Read what ``dataclasses.asdict`` gave, also from JSON; fields that are missing have their defaults.

        Raises:
            KeyError, TypeError, ValueError: ``values`` is something else.
        """
        options = {block: tuple(map(float, shares)) for block, shares in values["options"].items()}
        parts = tuple(map(cls.from_dict, values.get("parts", ())))
        row = cls(**{**values, "options": options, "parts": parts})
        check_kinds(row)
        return row


def beside_shares(uncounted: int) -> str:
    """The suffix of a printed share of cost: the number of contractions it leaves out; empty if none."""
    return f" (+{uncounted} uncounted)" if uncounted else ""


def pure_rows(rows: Iterable[EpochRow]) -> list[EpochRow]:
    """The rows of epochs, those with several stages in their parts."""
    return [part for row in rows for part in row.pure]


def turning_rows(rows: Iterable[EpochRow]) -> list[EpochRow]:
    """The rows, or parts of rows, after which another stage began."""
    pure = pure_rows(rows)
    return [before for before, after in pairwise(pure) if before.stage != after.stage]


def stages_text(rows: Iterable[EpochRow], levels: Sequence[str]) -> str:
    """The stages that a run had, each with its share of the samples."""
    pure = pure_rows(rows)
    samples = [sum(row.samples for row in pure if row.stage == stage) for stage in range(len(levels))]
    had = [
        f"{show_level(level)} for {100 * count / sum(samples):.0f} %"
        for level, count in zip(levels, samples, strict=True)
        if count
    ]
    left_out = [show_level(level) for level, count in zip(levels, samples, strict=True) if not count]
    return f"stages: {', '.join(had) or 'none'} of the samples" + (f"; never {', '.join(left_out)}" if left_out else "")


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns of text, aligned to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    rows = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (heads, *lines))
    return "\n".join(row.rstrip() for row in rows)


def cost_share(rows: Sequence[EpochRow], name: str) -> float:
    """``cp`` or another share (0..1) of cost, over the full-precision cost that it is a share of in all rows."""
    full = [row.full_samples * (1 if name == "cp_total" else row.steered) for row in rows]
    return float(sum(getattr(row, name) * macs for row, macs in zip(rows, full, strict=True))) / (sum(full) or 1)


def joined_parts(parts: Sequence[EpochRow]) -> EpochRow:
    """One row for the parts of an epoch: means over samples, shares of the cost of all, and the stage at its end."""
    samples = sum(part.samples for part in parts)

    def mean(values: Iterable[float]) -> float:
        return sum(part.samples * value for part, value in zip(parts, values, strict=True)) / max(samples, 1)

    losses = [part.loss for part in parts if part.samples]
    shares = {block: [part.options[block] for part in parts] for block in parts[0].options}
    return replace(
        parts[-1],
        loss=mean(part.loss or 0.0 for part in parts) if losses and None not in losses else None,
        cp=cost_share(parts, "cp"),
        cp_total=cost_share(parts, "cp_total"),
        fw=cost_share(parts, "fw"),
        eb=cost_share(parts, "eb"),
        gc=cost_share(parts, "gc"),
        samples=samples,
        relative_macs=mean(part.relative_macs for part in parts),
        steered=sum(part.steered * part.full_samples for part in parts)
        / (sum(part.full_samples for part in parts) or 1),
        options={block: tuple(map(mean, zip(*options, strict=True))) for block, options in shares.items()},
        parts=tuple(parts),
    )
