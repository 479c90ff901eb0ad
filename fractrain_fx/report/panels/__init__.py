"""Build the panels of a report from runs: its figures, their order, and their descriptions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fractrain_fx.errors import ConfigError
from fractrain_fx.report import frames
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
    tables = {
        "epochs": frames.epoch_rows(runs),
        "segments": [row for run in runs for row in frames.segment_rows(run)],
        "stages": frames.stage_rows(runs),
    }
    made = [trajectories(runs), stages(runs, tables["stages"], slugs)]
    gated = [run for run in runs if run.options]
    if gated:
        made.append(allocations(gated, tables, tuple(epochs), slugs))
        made += [panel for panel in [by_input(gated, tables, slugs)] if panel is not None]
    elif tuple(epochs):
        raise ConfigError("epochs select bit allocations, but none of these runs has gates: leave them out")
    made += [panel for build in (numerics, sensitivity) if (panel := build(runs, tables, slugs)) is not None]
    finished = [run for run in runs if run.result is not None]
    if finished:
        made.append(costs(finished, tables, slugs))
        made += [panel for panel in [machines(finished, tables)] if panel is not None]
    return Sheet(tuple(made), tables)


def _slugs(runs: Sequence[Run]) -> dict[str, str]:
    """A unique part of file names and element names for each run."""
    found: dict[str, str] = {}
    for run in runs:
        slug = base = re.sub(r"[^A-Za-z0-9_]+", "-", run.name).strip("-") or "run"
        number = 2
        while slug in found.values():
            slug, number = f"{base}-{number}", number + 1
        found[run.name] = slug
    return found
