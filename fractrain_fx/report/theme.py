"""Colours and fonts of the plots, light and dark. Text has a contrast of at least 4.5 on its background."""

from __future__ import annotations

from typing import Any

__all__ = ["PATH_COLOURS", "THEMES", "vega_config"]

_FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'

# Distinct on both backgrounds: at least 3:1, as WCAG requires for graphics.
PATH_COLOURS = ("#3b7dd8", "#c2620e", "#2f8f5b")

# "series" are for runs. "options" begin with grey for a skipped block; the others follow the bits.
THEMES: dict[str, dict[str, Any]] = {
    "light": {
        "ground": "#ffffff",
        "text": "#1c2430",
        "muted": "#56606e",
        "line": "#dfe3e8",
        "series": ["#1f5fbf", "#c2410c", "#0f7b5f", "#8b3fb0", "#8a5a00", "#be185d", "#0e7490", "#4d5b6b"],
        "options": ["#cfd4da", "#dce319", "#73d055", "#29af7f", "#238a8d", "#33638d", "#404788", "#440154"],
        "heat": ["#eef1f5", "#bfe3d0", "#5ec0a4", "#26828e", "#3b528b", "#440154"],
    },
    "dark": {
        "ground": "#171c24",
        "text": "#e6eaf0",
        "muted": "#a3adba",
        "line": "#333b47",
        "series": ["#7aa7f7", "#f5935c", "#4cc9a0", "#cf9af0", "#e0b84c", "#f07fb0", "#5cc8de", "#aab4c0"],
        "options": ["#4a525e", "#5b4b8f", "#3f66a0", "#2a8a94", "#2fb07f", "#7ad151", "#c5e021", "#fde725"],
        "heat": ["#262d38", "#433f7d", "#39688f", "#23988a", "#5ec962", "#fde725"],
    },
}


def vega_config(theme: str) -> dict[str, Any]:
    """Vega-Lite's configuration for ``light`` or ``dark``."""
    colours = THEMES[theme]
    text, muted, line = colours["text"], colours["muted"], colours["line"]
    return {
        "background": colours["ground"],
        "font": _FONT,
        "padding": 8,
        "view": {"stroke": None},
        "axis": {
            "labelColor": muted,
            "titleColor": text,
            "gridColor": line,
            "domainColor": line,
            "tickColor": line,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": 500,
            "titlePadding": 8,
            "labelLimit": 220,
        },
        "legend": {
            "labelColor": text,
            "titleColor": muted,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": 500,
            "orient": "top",
            "labelLimit": 260,
            "symbolStrokeWidth": 2,
        },
        "title": {"color": text, "fontSize": 14, "fontWeight": 600, "anchor": "start", "offset": 12},
        "text": {"color": muted, "fontSize": 11},
        "rule": {"color": muted},
        "tick": {"color": text, "opacity": 1, "stroke": colours["ground"], "strokeWidth": 1},
        "rect": {"fill": muted},
        "range": {
            "category": colours["series"],
            "ordinal": colours["options"],
            "heatmap": colours["heat"],
            "ramp": colours["heat"],
        },
    }
