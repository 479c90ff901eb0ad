"""How far the gates choose by input: a number for each epoch, and the images that got fewest and most bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fractrain_fx.report import charts, frames
from fractrain_fx.report.runs import Run
from fractrain_fx.report.sheet import Column, Figure, Panel, Variant

__all__ = ["by_input"]


def by_input(gated: Sequence[Run], tables: dict[str, list[frames.Row]], slugs: Mapping[str, str]) -> Panel | None:
    """The panel; adds the tables that its figures name. ``None`` where no run measured its gates' choices."""
    rows = frames.information_rows(gated)
    if not rows:
        return None
    tables["information"] = rows
    names = list(dict.fromkeys(row["run"] for row in rows))
    last = {row["run"]: row for row in rows}
    told = ", ".join(f"{name} {row['information']:.3f} bits a block" for name, row in last.items())
    figures = [
        Figure(
            key="information",
            summary=f"Mutual information between sample and option in each evaluation. At the end: {told}.",
            columns=(
                Column("run", "run"),
                Column("epoch", "epoch", "d"),
                Column("information", "bits a block", "g4"),
                Column("configurations", "configurations", "d"),
                Column("commonest", "most frequent configuration, % of samples", "f1"),
            ),
            variants={"": Variant(charts.information(names), ("information",), "choice by input, every epoch")},
        )
    ]
    for run in gated:
        pictures = frames.sample_rows(run)
        if pictures:
            tables[f"samples-{slugs[run.name]}"] = pictures
            figures.append(_pictures(run, f"samples-{slugs[run.name]}", pictures))
    return Panel(
        "inputs",
        "By input",
        "Whether gates choose by what they see: 0 bits where every sample of the test set is given the same option. "
        "Below it, the test images on which the gates spent fewest and most bits in the last evaluation.",
        tuple(figures),
    )


def _pictures(run: Run, table: str, rows: Sequence[frames.Row]) -> Figure:
    low, high = min(row["cp"] for row in rows), max(row["cp"] for row in rows)
    return Figure(
        key=table,
        summary=f"{run.name}: test images from the cheapest (cp {low:.2f} %) and from the dearest (cp {high:.2f} %).",
        columns=(Column("end", "images with"), Column("place", "place", "d"), Column("cp", "cp, %", "g4")),
        variants={"": Variant(charts.samples(table), (table,), f"{run.name}: cheapest and dearest test images")},
    )
