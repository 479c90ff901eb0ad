"""The panel of the cost of finished runs by path and block, in MACs and on BitFusion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt

from fractrain_fx.report import frames
from fractrain_fx.report.runs import Run
from fractrain_fx.report.sheet import Column, Control, Figure, Panel, Rendering, width_of
from fractrain_fx.report.spec import BAR, Spec, names, number_format, plain
from fractrain_fx.report.theme import PATH_COLOURS

__all__ = ["costs"]

_MEASURES = {"macs": "training MACs (32 bit)", "joules": "BitFusion energy, J", "seconds": "BitFusion latency, s"}
_SCOPES = {"end": "whole run", "best": "up to the best evaluation"}


def costs(runs: Sequence[Run], tables: dict[str, list[frames.Row]], slugs: Mapping[str, str]) -> Panel | None:
    """The panel; adds the tables of its figures. ``None`` if no run is finished."""
    finished = [run for run in runs if run.result is not None]
    if not finished:
        return None
    results = {run.name: run.result for run in runs if run.result is not None}
    unmeasured = [name for name, result in results.items() if not result.best_epoch]
    members = {"end": finished, "best": [run for run in finished if run.name not in unmeasured]}
    scopes = {scope: words for scope, words in _SCOPES.items() if members[scope]}
    for scope in scopes:
        tables[f"paths-{scope}"] = frames.path_rows(members[scope], scope)
        for run in members[scope]:
            tables[f"blocks-{scope}-{slugs[run.name]}"] = frames.block_rows(run, scope)
    plots = tuple(f"{quantity}-end" for quantity in frames.QUANTITIES)
    numbers = tuple(Column(name, title, "e3" if name == "macs" else "g4") for name, title in _MEASURES.items())
    totals = []
    for name, result in results.items():
        total = result.hardware["end"]["total"]
        totals.append(f"{name}: {total['macs']:.4g} MACs, {total['joules']:.4g} J, {total['seconds']:.4g} s.")
    variants = {
        f"{quantity}-{scope}": Rendering(
            _paths_chart(quantity, f"paths-{scope}", len(members[scope])),
            (f"paths-{scope}",),
            f"By path: {title}, {words}",
        )
        for quantity, title in _MEASURES.items()
        for scope, words in scopes.items()
    }
    summary = f"Stacked bars, one for each run. Whole runs: {' '.join(totals)}"
    figures = [
        Figure("paths", summary, (Column("run", "run"), Column("path", "path"), *numbers), variants, plots=plots)
    ]
    tops = {
        (quantity, scope): 1.02 * max(_dearest(frames.block_rows(run, scope), quantity) for run in members[scope])
        for quantity in frames.QUANTITIES
        for scope in scopes
    }
    for run in finished:
        slug = slugs[run.name]
        rows = len({row["block"] for row in tables[f"blocks-end-{slug}"]})
        by_block = {
            f"{quantity}-{scope}": Rendering(
                _blocks_chart(quantity, f"blocks-{scope}-{slug}", tops[quantity, scope], rows),
                (f"blocks-{scope}-{slug}",),
                f"{run.name} by block: {title}, {words}",
            )
            for quantity, title in _MEASURES.items()
            for scope, words in scopes.items()
            if run in members[scope]
        }
        columns = (Column("block", "block"), Column("path", "path"), *numbers)
        caption = (
            f"Stacked bars: what each block of {run.name} cost, by path; what is outside a block has its layer's name."
        )
        figures.append(Figure(f"blocks-{slug}", caption, columns, by_block, width=width_of(len(finished)), plots=plots))
    notes = []
    for name, result in results.items():
        if ops := result.hardware["end"]["unpriced"]:
            notes.append(f"BitFusion has no price for {len(ops)} ops of {name}, such as {', '.join(ops[:3])}.")
    if unmeasured:
        notes.append(f"{', '.join(unmeasured)}: no finite measure, so no best evaluation to sum cost up to.")
    return Panel(
        "cost",
        "Cost",
        "What training cost in forward (FW), error backward (EB) and weight gradient (GC) products, and in which "
        "block. Energy and latency are those of the BitFusion model at 500 MHz, without what is not a contraction.",
        tuple(figures),
        (
            Control("quantity", "Quantity", {"macs": "MACs", "joules": "energy", "seconds": "latency"}),
            Control("scope", "Summed over", scopes),
        ),
        tuple(notes),
    )


def _dearest(rows: Iterable[frames.Row], quantity: str) -> float:
    """The cost of the most expensive block, over all paths."""
    sums: dict[str, float] = {}
    for row in rows:
        sums[row["block"]] = sums.get(row["block"], 0.0) + row[quantity]
    return max(sums.values(), default=0.0)


def _paths_chart(quantity: str, table: str, runs: int) -> Spec:
    """The cost of forward, error backward and weight gradient of each run."""
    return plain(_by_path("run", quantity, table, alt.Undefined), height=34 * runs)


def _blocks_chart(quantity: str, table: str, top: float, rows: int) -> Spec:
    """The cost of each block of a run, split by path; ``top`` is the end of the axis."""
    return plain(_by_path("block", quantity, table, alt.Scale(domainMax=top)), height=BAR * rows)


def _by_path(rows: str, quantity: str, table: str, scale: Any) -> Any:
    axis = alt.Axis(format=number_format(quantity), tickCount=6)
    return (
        alt.Chart(alt.NamedData(name=table))
        .mark_bar()
        .encode(
            y=names(rows),
            x=alt.X(f"{quantity}:Q", title=_MEASURES[quantity], axis=axis, scale=scale),
            color=alt.Color(
                "path:N",
                title=None,
                sort=None,
                scale=alt.Scale(domain=list(frames.PATHS.values()), range=list(PATH_COLOURS)),
            ),
            order=alt.Order("path_order:Q"),
            tooltip=[
                alt.Tooltip(f"{rows}:N"),
                alt.Tooltip("path:N"),
                alt.Tooltip(f"{quantity}:Q", title=_MEASURES[quantity], format=".4~s"),
            ],
        )
    )
