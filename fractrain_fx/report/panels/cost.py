"""The panel of the cost of finished runs by path and block, in MACs and on BitFusion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fractrain_fx.report import charts, frames
from fractrain_fx.report.runs import Run
from fractrain_fx.report.sheet import Column, Control, Figure, Panel, Variant, width_of

__all__ = ["costs"]

_SCOPES = {"end": "whole run", "best": "up to the best evaluation"}


def costs(finished: Sequence[Run], tables: dict[str, list[frames.Row]], slugs: Mapping[str, str]) -> Panel:
    """The panel; adds the tables of its figures."""
    for scope in _SCOPES:
        tables[f"paths-{scope}"] = frames.path_rows(finished, scope)
        for run in finished:
            tables[f"blocks-{scope}-{slugs[run.name]}"] = frames.block_rows(run, scope)
    plots = tuple(f"{quantity}-end" for quantity in frames.QUANTITIES)
    numbers = tuple(Column(name, title, "e3" if name == "macs" else "g4") for name, title in charts.MEASURES.items())
    totals = []
    for run in finished:
        if run.result is not None:
            total = run.result.hardware["end"]["total"]
            amounts = f"{total['macs']:.4g} MACs, {total['joules']:.4g} J, {total['seconds']:.4g} s"
            totals.append(f"{run.name}: {amounts}.")
    variants = {
        f"{quantity}-{scope}": Variant(
            charts.paths(quantity, f"paths-{scope}", len(finished)), (f"paths-{scope}",), f"By path: {title}, {told}"
        )
        for quantity, title in charts.MEASURES.items()
        for scope, told in _SCOPES.items()
    }
    summary = f"Stacked bars, one for each run. Whole runs: {' '.join(totals)}"
    figures = [
        Figure("paths", summary, (Column("run", "run"), Column("path", "path"), *numbers), variants, plots=plots)
    ]
    tops = {
        (quantity, scope): 1.02 * max(_dearest(frames.block_rows(run, scope), quantity) for run in finished)
        for quantity in frames.QUANTITIES
        for scope in _SCOPES
    }
    for run in finished:
        slug = slugs[run.name]
        rows = len({row["block"] for row in tables[f"blocks-end-{slug}"]})
        own = {
            f"{quantity}-{scope}": Variant(
                charts.blocks(quantity, f"blocks-{scope}-{slug}", tops[quantity, scope], rows),
                (f"blocks-{scope}-{slug}",),
                f"{run.name} by block: {title}, {told}",
            )
            for quantity, title in charts.MEASURES.items()
            for scope, told in _SCOPES.items()
        }
        columns = (Column("block", "block"), Column("path", "path"), *numbers)
        told = (
            f"Stacked bars: what each block of {run.name} cost, by path; what is outside a block has its layer's name."
        )
        figures.append(Figure(f"blocks-{slug}", told, columns, own, width=width_of(len(finished)), plots=plots))
    old = [
        run.name for run in finished if any(row["path"] == frames.ALL_PATHS for row in frames.block_rows(run, "end"))
    ]
    notes = [f"Grey: the paths of each block were not kept by {', '.join(old)}."] if old else []
    for run in finished:
        if run.result is not None and (ops := run.result.hardware["end"].get("unpriced")):
            notes.append(f"BitFusion has no price for {len(ops)} ops of {run.name}, such as {', '.join(ops[:3])}.")
    return Panel(
        "cost",
        "Cost",
        "What training cost in forward (FW), error backward (EB) and weight gradient (GC) products, and in which "
        "block. Energy and latency are those of the BitFusion model at 500 MHz, without what is not a contraction.",
        tuple(figures),
        (
            Control("quantity", "Quantity", {"macs": "MACs", "joules": "energy", "seconds": "latency"}),
            Control("scope", "Summed over", _SCOPES),
        ),
        tuple(notes),
    )


def _dearest(rows: Iterable[frames.Row], quantity: str) -> float:
    """The cost of the most expensive block, over all paths."""
    sums: dict[str, float] = {}
    for row in rows:
        sums[row["block"]] = sums.get(row["block"], 0.0) + row[quantity]
    return max(sums.values())
