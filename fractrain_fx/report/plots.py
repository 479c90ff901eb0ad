"""The report's plots as files, SVG and PNG, drawn without a browser."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import vl_convert

from fractrain_fx.errors import RunError
from fractrain_fx.report.sheet import Figure, Sheet
from fractrain_fx.report.theme import vega_config

__all__ = ["write_plots"]

_WIDTHS = {"whole": 760, "half": 520, "third": 420}  # pixels
_SCALE = 2.0  # PNG pixels for each SVG pixel


def write_plots(sheet: Sheet, folder: Path) -> list[Path]:
    """Write each figure as ``NAME.svg`` and ``NAME.png``; returns their paths.

    Raises:
        RunError: the folder cannot be written to.
    """
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for figure in (figure for panel in sheet.panels for figure in panel.figures):
            for key in figure.plots:
                name = f"{figure.key}-{key}" if key else figure.key
                drawn = vl_convert.vegalite_to_svg(_whole(figure, key, sheet), config=vega_config("light"))
                svg, png = folder / f"{name}.svg", folder / f"{name}.png"
                svg.write_text(drawn, encoding="utf-8")
                png.write_bytes(vl_convert.svg_to_png(drawn, scale=_SCALE))
                written += [svg, png]
    except OSError as error:
        raise RunError(f"the plots could not be written to {folder} ({error}): give another folder") from error
    return written


def _whole(figure: Figure, key: str, sheet: Sheet) -> dict[str, Any]:
    """A figure's specification with its title, its width and its data."""
    variant = figure.variants[key]
    by_epoch = figure.pivot is not None and figure.pivot[1] == "option"
    title = f"{variant.title}, epoch {key}" if by_epoch else variant.title
    data = {
        name: [row for row in sheet.tables[name] if not by_epoch or row["epoch"] == int(key)] for name in variant.data
    }
    spec = copy.deepcopy(variant.spec)
    return spec | {"title": title, "width": _WIDTHS[figure.width], "datasets": data}
