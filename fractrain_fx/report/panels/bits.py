"""The panel of precisions that each block chose in each epoch (supplement, figure 2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import altair as alt

from fractrain_fx.errors import ConfigError
from fractrain_fx.report import frames
from fractrain_fx.report.runs import Run
from fractrain_fx.report.sheet import Column, Control, Figure, Panel, Rendering
from fractrain_fx.report.spec import Spec, map_height, names, plain, span

__all__ = ["allocations"]


def allocations(
    runs: Sequence[Run], tables: dict[str, list[frames.Row]], slugs: Mapping[str, str], asked: tuple[int, ...] = ()
) -> Panel | None:
    """The panel; adds the tables of its figures. ``None`` if no run has gates.

    Raises:
        ConfigError: ``asked`` has an epoch that no run with gates has.
    """
    gated = [run for run in runs if run.options]
    if not gated and asked:
        raise ConfigError("epochs select bit allocations, but none of these runs has gates: leave them out")
    if not gated:
        return None
    epochs = _epochs(gated, asked)
    named = [run for run in gated if run.settings is not None]  # without settings, options have no names
    tables |= {f"bits-{slugs[run.name]}": frames.bits_rows(run) for run in named}
    tables |= {f"allocation-{slugs[run.name]}": frames.allocation_rows(run) for run in gated}
    top = max((row["bits"] for run in named for row in tables[f"bits-{slugs[run.name]}"]), default=0.0)
    figures = []
    for run in gated:
        figures.append(_allocation(run, f"allocation-{slugs[run.name]}", epochs))
        if run in named:
            figures.append(_map(run, f"bits-{slugs[run.name]}", top))
    longest = max(run.stages[-1].last for run in gated)
    control = Control(
        "epoch", "Epoch", {str(epoch): f"epoch {epoch}" for epoch in epochs}, kind="epoch", first=1, last=longest
    )
    return Panel(
        "bits",
        "Bits",
        "Which precision each block took for how many of its samples, FW for activations and BW for gradients "
        "(figure 2 of the supplement). FW-0/BW-0 skips the block.",
        tuple(figures),
        (control,),
    )


def _epochs(gated: Sequence[Run], chosen: tuple[int, ...]) -> tuple[int, ...]:
    longest = max(run.stages[-1].last for run in gated)
    for epoch in chosen:
        if not 1 <= epoch <= longest:
            raise ConfigError(f"epoch {epoch} is in none of these runs: write some of 1 to {longest}")
    ends = {stage.last for run in gated for stage in run.stages}
    return tuple(sorted(set(chosen))) or (
        tuple(sorted(ends)) if len(ends) <= 8 else (1, math.ceil(longest / 2), longest)
    )


def _allocation(run: Run, table: str, epochs: Sequence[int]) -> Figure:
    def at(epoch: int) -> Rendering:
        return Rendering(_options_chart(table, run.options, epoch), (table,), f"{run.name}: options chosen")

    last = run.stages[-1].last
    plots = {str(epoch): at(epoch) for epoch in epochs if epoch <= last}
    summary = (
        f"Stacked bars: for each of {_blocks(run)} blocks, the share of samples that took each of {len(run.options)} "
        "precision options, at the chosen epoch."
    )
    return Figure(
        key=table,
        summary=summary,
        columns=(Column("share", "samples, %", "f1"),),
        variants={"": at(last)} | plots,
        pivot=("block", "option", "share"),
        plots=tuple(plots),
    )


def _map(run: Run, table: str, top: float) -> Figure:
    variant = Rendering(_bits_chart(table, _blocks(run), top), (table,), f"{run.name}: mean forward bits, all epochs")
    return Figure(
        key=table,
        summary=f"A map of {_blocks(run)} blocks by {len(run.records)} epochs: mean bits of the forward pass.",
        columns=(Column("bits", "bits", "f2"),),
        variants={"": variant},
        pivot=("block", "epoch", "bits"),
    )


def _blocks(run: Run) -> int:
    return len(run.records[0].row.options)


def _options_chart(table: str, options: Sequence[str], epoch: int) -> Spec:
    """The shares of options that each block chose in one epoch (supplement, figure 2)."""
    chosen = alt.param(name="epoch", value=epoch)
    chart = (
        alt.Chart(alt.NamedData(name=table))
        .transform_filter("datum.epoch === epoch")
        .mark_bar()
        .encode(
            x=alt.X(
                "block:N",
                title=None,
                sort=None,
                axis=alt.Axis(labelAngle=-60, domain=False, ticks=False),
                scale=alt.Scale(paddingInner=0.12),
            ),
            y=alt.Y("share:Q", title="samples, %", scale=alt.Scale(domain=[0, 100]), stack="zero"),
            order=alt.Order("order:Q"),
            color=alt.Color("option:N", title=None, sort=None, scale=alt.Scale(domain=list(options), range="ordinal")),
            tooltip=[
                alt.Tooltip("block:N"),
                alt.Tooltip("option:N"),
                alt.Tooltip("share:Q", title="samples, %", format=".1f"),
            ],
        )
        .add_params(chosen)
    )
    return plain(chart, height=260)


def _bits_chart(table: str, blocks: int, top: float) -> Spec:
    """The mean forward bits of each block over the epochs (skipping counts as 0); ``top`` is the end of the scale."""
    heat = alt.Scale(domain=[0, top], range="heatmap", interpolate="rgb")
    chart = (
        alt.Chart(alt.NamedData(name=table))
        .transform_calculate(start="datum.epoch - 0.5", end="datum.epoch + 0.5")
        .mark_rect()
        .encode(
            x=span("epoch", "d"),
            x2="end:Q",
            y=names("block"),
            color=alt.Color("bits:Q", title="mean forward bits", scale=heat),
            tooltip=[
                alt.Tooltip("block:N"),
                alt.Tooltip("epoch:Q"),
                alt.Tooltip("bits:Q", title="mean forward bits", format=".2f"),
            ],
        )
    )
    return plain(chart, height=map_height(blocks))
