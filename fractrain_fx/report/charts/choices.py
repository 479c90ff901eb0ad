"""Plots of what gates chose: options of each block, mean bits, and how much the input decides."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from fractrain_fx.report.charts.spec import Spec, plain

__all__ = ["allocation", "bits", "information", "samples"]

_ROW = 15  # height of a block, in pixels


def allocation(table: str, options: Sequence[str], epoch: int) -> Spec:
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


def bits(table: str, blocks: int, top: float) -> Spec:
    """The mean forward bits of each block over the epochs (skipping counts as 0); ``top`` is the end of the scale."""
    heat = alt.Scale(domain=[0, top], range="heatmap", interpolate="rgb")
    chart = (
        alt.Chart(alt.NamedData(name=table))
        .transform_calculate(start="datum.epoch - 0.5", end="datum.epoch + 0.5")
        .mark_rect()
        .encode(
            x=alt.X(
                "start:Q", title="epoch", scale=alt.Scale(nice=False, zero=False), axis=alt.Axis(format="d", grid=False)
            ),
            x2="end:Q",
            y=alt.Y("block:N", title=None, sort=None, axis=alt.Axis(domain=False, ticks=False)),
            color=alt.Color("bits:Q", title="mean forward bits", scale=heat),
            tooltip=[
                alt.Tooltip("block:N"),
                alt.Tooltip("epoch:Q"),
                alt.Tooltip("bits:Q", title="mean forward bits", format=".2f"),
            ],
        )
    )
    return plain(chart, height=max(90, _ROW * blocks))


def information(runs: Sequence[str]) -> Spec:
    """Mutual information between sample and option over the epochs, one line for each run."""
    chart = (
        alt.Chart(alt.NamedData(name="information"))
        .mark_line(point=True)
        .encode(
            x=alt.X("epoch:Q", title="epoch", axis=alt.Axis(format="d", tickMinStep=1)),
            y=alt.Y("information:Q", title="bits a block", scale=alt.Scale(domainMin=0)),
            color=alt.Color("run:N", title=None, scale=alt.Scale(domain=list(runs))),
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


def samples(table: str) -> Spec:
    """Pictures of the samples at both ends, from the extreme inwards."""
    base = alt.Chart(alt.NamedData(name=table)).encode(
        x=alt.X("place:O", title=None, axis=None),
        y=alt.Y("end:N", title=None, sort=None, axis=alt.Axis(domain=False, ticks=False)),
        tooltip=[alt.Tooltip("end:N"), alt.Tooltip("cp:Q", title="cp, %", format=".3g")],
    )
    pictures = base.mark_image(width=48, height=48).encode(url="picture:N")
    costs = base.mark_text(dy=34, fontSize=10).encode(text=alt.Text("cp:Q", format=".3g"))
    return plain(pictures + costs, height=170)
