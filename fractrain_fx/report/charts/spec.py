"""What all plots share: their specification as plain values, number formats and the height of a bar."""

from __future__ import annotations

from typing import Any

__all__ = ["BAR", "Spec", "number_format", "plain"]

Spec = dict[str, Any]
"""A Vega-Lite specification."""

BAR = 18
"""Height of a bar, in pixels."""


def number_format(field: str) -> str:
    """How an axis writes the numbers of a field."""
    return "d" if field == "epoch" else "~s" if field in ("macs", "joules") else "~g"


def plain(chart: Any, height: int) -> Spec:
    """The specification as plain values; the page and ``plots`` set its width."""
    spec: Spec = chart.properties(height=height, width="container").to_dict(validate=False)
    for name in ("config", "$schema"):
        spec.pop(name, None)
    return spec
