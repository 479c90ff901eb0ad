"""The precisions at which a run trained each op, from the options that its ledger kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from fractrain_fx.config import FracConfig
from fractrain_fx.config.precision import FULL, Precision
from fractrain_fx.config.targets import scheduled_precision
from fractrain_fx.engine.rows import EpochRow, joined_parts, pure_rows
from fractrain_fx.hardware.machine import Choice
from fractrain_fx.nn.cost import OpCost
from fractrain_fx.passes import Op

if TYPE_CHECKING:
    from fractrain_fx.model import FracModel

__all__ = ["STEERED", "Taken", "by_stage", "choice_of", "taken"]

STEERED = frozenset({"gated", "scheduled"})
"""Modes of ops whose precision the method decides."""


class Taken(NamedTuple):
    """The share (0..1) of samples that trained an op at a precision; ``weight_bits`` are those of a gated method."""

    share: float
    precision: Precision
    weight_bits: int | None = None


def by_stage(rows: Iterable[EpochRow]) -> dict[str, EpochRow]:
    """One row for each stage of a ledger, by number and level: cost is linear in the share of each option."""
    stages: dict[str, list[EpochRow]] = {}
    for part in pure_rows(rows):
        stages.setdefault(f"{part.stage + 1}: {part.level}", []).append(part)
    return {stage: joined_parts(members) for stage, members in stages.items()}


def taken(model: FracModel, op: Op, row: EpochRow) -> list[Taken]:
    """The precisions of an op in an epoch or a stage."""
    config, mode, weight_bits = model.frac_config, op.precision.mode, op.weight_bits(model.frac_config)
    if mode == "gated":
        chosen = zip(op.options(config), row.options[op.block or ""], strict=True)
        return [Taken(share, option, weight_bits) for option, share in chosen if share]
    if mode == "scheduled" and config.gated:
        return [Taken(1.0, scheduled_precision(config, model.targets[row.stage]), weight_bits)]
    if mode == "scheduled":
        return [Taken(1.0, op.precision.at(config, Precision.parse(row.level)))]
    return [Taken(1.0, op.precision.precision or FULL)]


def choice_of(op: Op, cost: OpCost, config: FracConfig, precision: Precision, weight_bits: int | None) -> Choice:
    """How a machine is told that an op trains at a precision; ``weight_bits`` for products with a weight."""
    recipe, format = op.precision.recipe_under(config), op.precision.format or config.format
    return Choice(
        precision,
        weight_bits if cost.weight else None,
        format,
        least=cost.least,
        by_product=cost.by_product,
        formats=None if recipe is None or set(recipe.formats) == {format} else recipe.formats,
    )
