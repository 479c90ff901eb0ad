"""Build the panels of a report from runs: its figures, their order, and their descriptions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial

from fractrain_fx.report.frames import Row
from fractrain_fx.report.panels.bits import allocations
from fractrain_fx.report.panels.cost import costs
from fractrain_fx.report.panels.inputs import by_input
from fractrain_fx.report.panels.machines import machines
from fractrain_fx.report.panels.numerics import numerics
from fractrain_fx.report.panels.sensitivity import sensitivity
from fractrain_fx.report.panels.stages import stages
from fractrain_fx.report.panels.trajectory import trajectories
from fractrain_fx.report.runs import Run
from fractrain_fx.report.sheet import Sheet

__all__ = ["build_sheet"]


def build_sheet(runs: Sequence[Run], epochs: Iterable[int] = ()) -> Sheet:
    """All panels and tables of a report.

    Args:
        runs: at least one run.
        epochs: epochs of the bit allocations to draw; by default those at the end of each stage.

    Raises:
        ConfigError: no run with gates has one of the epochs.
    """
    slugs = _slugs(runs)
    tables: dict[str, list[Row]] = {}
    bits = partial(allocations, asked=tuple(epochs))
    builders = (trajectories, stages, bits, by_input, numerics, sensitivity, costs, machines)
    panels = tuple(panel for build in builders if (panel := build(runs, tables, slugs)) is not None)
    return Sheet(panels, tables)


def _slugs(runs: Sequence[Run]) -> dict[str, str]:
    """A unique part of file names and element names for each run."""
    slugs: dict[str, str] = {}
    for run in runs:
        slug = base = re.sub(r"[^A-Za-z0-9_]+", "-", run.name).strip("-") or "run"
        number = 2
        while slug in slugs.values():
            slug, number = f"{base}-{number}", number + 1
        slugs[run.name] = slug
    return slugs
