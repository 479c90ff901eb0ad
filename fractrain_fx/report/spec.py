"""The parts that plots share: their specification as plain values, encodings, number formats, and heights.

Each plot is Vega-Lite over a named table (``frames``), without data and with the theme's colours only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

__all__ = ["BAR", "Spec", "map_height", "names", "number_format", "plain", "run_colour", "span"]

Spec = dict[str, Any]
"""A Vega-Lite specification."""

BAR = 18
"""Height of a bar, in pixels."""


def names(field: str, **more: Any) -> alt.Y:
    """Rows by name, in the order of the table."""
    return alt.Y(f"{field}:N", title=None, sort=None, axis=alt.Axis(domain=False, ticks=False), **more)


def run_colour(runs: Sequence[str], **more: Any) -> alt.Color:
    """A colour for each run."""
    return alt.Color("run:N", title=None, scale=alt.Scale(domain=list(runs)), **more)


def span(title: str, format: str) -> alt.X:
    """The ``start`` of marks that reach to another field of their row, along epochs or steps."""
    return alt.X(
        "start:Q", title=title, scale=alt.Scale(nice=False, zero=False), axis=alt.Axis(format=format, grid=False)
    )


def map_height(rows: int) -> int:
    """The height of a map of so many rows, in pixels."""
    return max(90, 15 * rows)


def number_format(field: str) -> str:
    """How an axis writes the numbers of a field."""
    return "d" if field == "epoch" else "~s" if field in ("macs", "joules") else "~g"


def plain(chart: Any, height: int) -> Spec:
    """The specification as plain values; the page and ``write_plots`` set its width."""
    spec: Spec = chart.properties(height=height, width="container").to_dict(validate=False)
    for name in ("config", "$schema"):
        spec.pop(name, None)
    return spec
