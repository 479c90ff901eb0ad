"""The panel of what the training of finished runs would take on named machines, beside float on the same machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import altair as alt

from fractrain_fx.report import frames
from fractrain_fx.report.runs import Run
from fractrain_fx.report.sheet import Column, Figure, Panel, Rendering
from fractrain_fx.report.spec import BAR, Spec, names, plain, run_colour
from fractrain_fx.summary.numbers import plain_number, time_unit

__all__ = ["machines"]

_TIMES = {"seconds": "training", "float32": "in float32", "bfloat16": "in bfloat16"}
_COLUMNS = (
    Column("machine", "machine"),
    Column("run", "run"),
    Column("seconds", "training, s", "g4"),
    Column("float32", "in float32, s", "g4"),
    Column("bfloat16", "in bfloat16, s", "g4"),
    Column("of_float32", "% of float32", "g4"),
    Column("joules", "training, J", "g4"),
    Column("float32_joules", "in float32, J", "g4"),
    Column("compute", "bound by compute, %", "f1"),
    Column("memory", "by memory, %", "f1"),
    Column("rounding", "by rounding, %", "f1"),
    Column("wider", "computed wider"),
    Column("unpriced", "contractions without a price", "d"),
)


def machines(runs: Sequence[Run], tables: dict[str, list[frames.Row]], slugs: Mapping[str, str]) -> Panel | None:
    """The panel; adds the table of its figure. ``None`` if no machine has a price for any run."""
    finished = [run for run in runs if run.result is not None]
    rows = frames.machine_rows(finished)
    if not rows:
        return None
    tables["machines"] = rows
    top = max(max(row["of_float32"], row["bfloat16_of_float32"] or 0.0) for row in rows)
    times = "; ".join(_told(row) for row in rows)
    figure = Figure(
        key="machines",
        summary=f"Bars: time of each run on each machine as a share of float32. {times}.",
        columns=_COLUMNS,
        variants={
            "": Rendering(_chart([run.name for run in finished], top, len(rows)), ("machines",), "Time of training")
        },
    )
    return Panel(
        "machines",
        "Machines",
        "What the training of each run would take on a machine that computes narrow numbers in narrow units, computed "
        "from the precisions that were used: all forward and backward passes, on one device, without optimizer, gates, "
        "data and evaluation. Bars are relative to the same steps in float32 on that machine, ticks are bfloat16, and "
        "the times stand on the right. What a method leaves in float counts as bfloat16 if the machine has it.",
        (figure,),
        notes=tuple(_notes(finished, rows)),
    )


def _told(row: frames.Row) -> str:
    times = {"": row["seconds"], " in float32": row["float32"], " in bfloat16": row["bfloat16"]}
    unit, size = time_unit(seconds for seconds in times.values() if seconds is not None)
    texts = (f"{plain_number(seconds / size)} {unit}{where}" for where, seconds in times.items() if seconds is not None)
    return f"{row['run']} on {row['machine']}: {', '.join(texts)}"


def _notes(finished: Sequence[Run], rows: Sequence[frames.Row]) -> Iterator[str]:
    if any(row["wider"] for row in rows):
        yield (
            "An asterisk marks machines without units for some precisions of a run, which they compute at the next "
            "wider type: the data table names them."
        )
    priced = [(run.name, estimate) for run in finished if run.result is not None for estimate in run.result.machines]
    if alone := dict.fromkeys(estimate.machine for _, estimate in priced if estimate.contractions_only):
        yield (
            f"Contractions alone have a price on {' and '.join(alone)}: no norms, activation functions and sums. Their "
            "float32 is integers of 32 bits."
        )
    if any(row["joules"] is None for row in rows):
        unknown = dict.fromkeys(row["machine"] for row in rows if row["joules"] is None)
        yield f"No figure for energy is known of {', '.join(unknown)}."
    for name, estimate in priced:
        if estimate.unpriced:
            left = "is left out" if estimate.seconds is None else "its numbers are those of the others"
            yield (
                f"{estimate.machine} has no price for {len(estimate.unpriced)} contractions of {name}, such as "
                f"{', '.join(estimate.unpriced[:3])}: {left}."
            )


def _chart(runs: Sequence[str], top: float, rows: int) -> Spec:
    """The time of each run on each machine as a share of float32, with bfloat16 as a tick; ``top`` is the largest."""
    share = alt.Scale(domain=[0, 1.2 * top])  # right of the bars, the times stand as text
    bands = alt.Scale(paddingInner=0.2, paddingOuter=0.1)
    base = alt.Chart(alt.NamedData(name="machines")).encode(
        y=names("machine", scale=bands),
        yOffset=alt.YOffset("run:N", sort=list(runs)),
        tooltip=[
            alt.Tooltip("machine:N"),
            alt.Tooltip("run:N"),
            *(alt.Tooltip(f"{name}:Q", title=f"{title}, s", format=".4~g") for name, title in _TIMES.items()),
            alt.Tooltip("joules:Q", title="training, J", format=".4~g"),
            alt.Tooltip("wider:N", title="computed wider"),
        ],
    )
    bars = base.mark_bar(cornerRadiusEnd=2).encode(
        x=alt.X("of_float32:Q", title="% of the time in float32", scale=share, axis=alt.Axis(tickCount=6)),
        color=run_colour(runs),
    )
    ticks = base.transform_filter("isValid(datum.bfloat16_of_float32)").mark_tick(thickness=4)
    labels = base.mark_text(align="right").encode(x=alt.value("width"), text="label:N")
    layers = alt.layer(bars, ticks.encode(x="bfloat16_of_float32:Q"), labels)
    return plain(layers, height=BAR * rows)
