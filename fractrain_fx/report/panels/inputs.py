"""How far the gates choose by input: a number for each epoch, and the images that got fewest and most bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import altair as alt

from fractrain_fx.report import frames
from fractrain_fx.report.runs import Run
from fractrain_fx.report.sheet import Column, Figure, Panel, Rendering
from fractrain_fx.report.spec import Spec, names, plain, run_colour

__all__ = ["by_input"]


def by_input(runs: Sequence[Run], tables: dict[str, list[frames.Row]], slugs: Mapping[str, str]) -> Panel | None:
    """The panel; adds the tables that its figures name. ``None`` if no run measured its gates' choices."""
    gated = [run for run in runs if run.options]
    rows = frames.information_rows(gated)
    if not rows:
        return None
    tables["information"] = rows
    shown = list(dict.fromkeys(row["run"] for row in rows))
    last = {row["run"]: row for row in rows}
    at_end = ", ".join(f"{name} {row['information']:.3f} bits a block" for name, row in last.items())
    figures = [
        Figure(
            key="information",
            summary=f"Mutual information between sample and option in each evaluation. At the end: {at_end}.",
            columns=(
                Column("run", "run"),
                Column("epoch", "epoch", "d"),
                Column("information", "bits a block", "g4"),
                Column("configurations", "configurations", "d"),
                Column("commonest", "most frequent configuration, % of samples", "f1"),
            ),
            variants={"": Rendering(_information_chart(shown), ("information",), "choice by input, every epoch")},
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
        variants={"": Rendering(_samples_chart(table), (table,), f"{run.name}: cheapest and dearest test images")},
    )


def _information_chart(runs: Sequence[str]) -> Spec:
    """Mutual information between sample and option over the epochs, one line for each run."""
    chart = (
        alt.Chart(alt.NamedData(name="information"))
        .mark_line(point=True)
        .encode(
            x=alt.X("epoch:Q", title="epoch", axis=alt.Axis(format="d", tickMinStep=1)),
            y=alt.Y("information:Q", title="bits a block", scale=alt.Scale(domainMin=0)),
            color=run_colour(runs),
            tooltip=[
                alt.Tooltip("run:N"),
                alt.Tooltip("epoch:Q"),
                alt.Tooltip("information:Q", title="bits a block", format=".3f"),
                alt.Tooltip("configurations:Q"),
                alt.Tooltip("commonest:Q", title="most frequent configuration, % of samples", format=".1f"),
            ],
        )
    )
    return plain(chart, height=220)


def _samples_chart(table: str) -> Spec:
    """Pictures of the samples at both ends, from the extreme inwards."""
    base = alt.Chart(alt.NamedData(name=table)).encode(
        x=alt.X("place:O", title=None, axis=None),
        y=names("end"),
        tooltip=[alt.Tooltip("end:N"), alt.Tooltip("cp:Q", title="cp, %", format=".3g")],
    )
    pictures = base.mark_image(width=48, height=48).encode(url="picture:N")
    costs = base.mark_text(dy=34, fontSize=10).encode(text=alt.Text("cp:Q", format=".3g"))
    return plain(pictures + costs, height=170)
