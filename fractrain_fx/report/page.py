"""The report as an HTML file that needs no other file, and its plots as files drawn without a browser."""

from __future__ import annotations

import base64
import copy
import gzip
import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import vl_convert
from markupsafe import Markup

from fractrain_fx.engine.rows import beside_shares
from fractrain_fx.errors import RunError
from fractrain_fx.report.frames import Row, epoch_rows
from fractrain_fx.report.runs import Run
from fractrain_fx.report.sheet import Figure, Panel, Sheet
from fractrain_fx.report.theme import THEMES, vega_config
from fractrain_fx.summary.numbers import plain_number
from fractrain_fx.training.log.records import SETTINGS

__all__ = ["pack_rows", "render_page", "write_plots"]

_TEMPLATE = Path(__file__).with_name("template")
_NONE = "-"
_WIDTHS = {"whole": 760, "half": 520, "third": 420}  # pixels
_SCALE = 2.0  # PNG pixels for each SVG pixel
_CANVAS_ROWS = 2000  # for more rows a browser draws one canvas quicker than many elements


def render_page(runs: Sequence[Run], sheet: Sheet) -> str:
    """The whole page as text; it needs no other file and no network."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("page.html.j2").render(
        title="FracTrain report",
        subtitle=_subtitle(runs),
        version=version("fractrain_fx"),
        summary=_summary(runs),
        panels=sheet.panels,
        commands=[{"name": run.name, "commands": _commands(run)} for run in runs],
        settings=_settings(runs),
        data=_embed(json.dumps(_data(sheet), separators=(",", ":"), allow_nan=False)),
        style=Markup((_TEMPLATE / "page.css").read_text(encoding="utf-8")),
        script=Markup((_TEMPLATE / "page.js").read_text(encoding="utf-8")),
        library=_library(),
    )


@cache
def _library() -> Markup:
    """Vega, Vega-Lite and Vega-Embed as one script."""
    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return Markup(script.replace("</script", "<\\/script"))


def _data(sheet: Sheet) -> dict[str, Any]:
    return {
        "tables": {name: pack_rows(rows) for name, rows in sheet.tables.items()},
        "figures": {figure.key: _figure(figure, panel, sheet) for panel in sheet.panels for figure in panel.figures},
        "themes": {
            name: {"series": colours["series"], "config": vega_config(name)} for name, colours in THEMES.items()
        },
    }


def _figure(figure: Figure, panel: Panel, sheet: Sheet) -> dict[str, Any]:
    by_epoch = figure.pivot is not None and figure.pivot[1] == "option"
    table = sheet.tables[next(iter(figure.variants.values())).data[0]]
    return {
        "variants": {
            key: {"spec": rendering.spec, "data": rendering.data, "title": rendering.title}
            for key, rendering in figure.variants.items()
            if not by_epoch or not key  # the page itself switches between epochs
        },
        "columns": [vars(column) for column in figure.columns],
        "where": figure.where,
        "pivot": figure.pivot,
        "picks": figure.picks,
        "last": max(row["epoch"] for row in table) if by_epoch else None,
        "canvas": not by_epoch and figure.pivot is not None and len(table) > _CANVAS_ROWS,
    }


def pack_rows(rows: Sequence[Row]) -> str:
    """Rows as columns, gzipped; the same rows always give the same text."""
    names = list(rows[0]) if rows else []
    columns = {name: [row[name] for row in rows] for name in names}
    text = json.dumps(columns, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _embed(text: str) -> Markup:
    """JSON that cannot end the script element around it."""
    return Markup(text.replace("<", "\\u003c"))


def _subtitle(runs: Sequence[Run]) -> str:
    known = [run.settings for run in runs if run.settings is not None]
    tasks = dict.fromkeys(f"{settings.model} on {settings.data}" for settings in known)
    return "; ".join(tasks) or f"{len(runs)} run{'s' if len(runs) > 1 else ''}"


def _summary(runs: Sequence[Run]) -> dict[str, Any]:
    """One row for each run, from its epochs. Energy and latency come from its result, or are summed over epochs."""
    metrics = list(dict.fromkeys(run.metric for run in runs))
    measure = f"test {metrics[0]}" if len(metrics) == 1 else "test measure"
    unit = "%" if metrics == ["accuracy"] else ""
    headings = [
        ("run", ""),
        ("epochs", ""),
        (measure, unit),
        ("best", "and its epoch"),
        ("mean cp", "%"),
        ("mean cp_total", "%"),
        ("training MACs", "32 bit"),
        ("energy", "BitFusion, J"),
        ("latency", "BitFusion, s"),
        ("measured", "s"),
        ("turning points", "epoch"),
    ]
    return {
        "headings": [{"name": name, "unit": unit} for name, unit in headings],
        "rows": [{"name": run.name, "what": _what(run), "cells": _cells(run, len(metrics) > 1)} for run in runs],
        "notes": [f"{run.name}: {note}" for run in runs for note in run.notes],
    }


def _what(run: Run) -> str:
    if run.settings is None:
        return "metrics only"
    frac = run.settings.frac
    words = [f"{frac.method} {frac.precision}" if frac.method == "static" else frac.method]
    if run.settings.number_format:
        words.append(run.settings.number_format)
    if frac.pins:
        words.append(f"pins {' '.join(f'{pin.pattern}={pin.named or pin.precision}' for pin in frac.pins)}")
    return ", ".join(words if run.result is not None else [*words, "not through"])


def _cells(run: Run, name_metric: bool) -> list[str]:
    last, best = run.records[-1], run.best
    energy, latency = _hardware(run)
    return [
        f"{last.row.epoch}",
        _number(last.value, "{:.2f}".format) + (f" {run.metric}" if name_metric else ""),
        _NONE if best is None else f"{best.value:.2f} ({best.row.epoch})",
        f"{100 * run.mean('cp'):.2f}",
        f"{100 * run.mean('cp_total'):.2f}{beside_shares(last.row.uncounted)}",
        f"{last.total_macs:.3e}",
        _number(energy),
        _number(latency),
        f"{last.seconds:.0f}",
        ", ".join(run.turning_texts) or _NONE,
    ]


def _hardware(run: Run) -> tuple[float | None, float | None]:
    if run.result is not None:
        return run.result.energy, run.result.latency
    last = epoch_rows([run])[-1]
    return last["joules"], last["bitfusion_seconds"]


def _number(value: float | None, form: Callable[[float], str] = plain_number) -> str:
    return _NONE if value is None or not math.isfinite(value) else form(value)


def _commands(run: Run) -> list[dict[str, str]]:
    commands = [
        {
            "text": start.command,
            "about": f"{'started' if start.epoch == 0 else f'continued after epoch {start.epoch}'} on {start.device}, "
            f"{start.processes} process{'es' if start.processes > 1 else ''}; "
            + ", ".join(f"{name} {number}" for name, number in start.versions.items()),
        }
        for start in run.starts
    ]
    if not commands and run.settings is not None:
        again = f"fractrain train --config {run.path / SETTINGS}"
        commands.append({"text": again, "about": "How it was started was not kept; this repeats it with its settings."})
    return commands


def _settings(runs: Sequence[Run]) -> dict[str, Any]:
    """All settings of the runs that have them. Settings that differ come first."""
    known = [(run.name, _flat(run.settings.to_dict())) for run in runs if run.settings is not None]
    names = list(dict.fromkeys(name for _, values in known for name in values))
    rows = []
    for name in names:
        values = [_text(values.get(name)) for _, values in known]
        rows.append({"name": name, "values": values, "same": len(set(values)) == 1 and len(known) > 1})
    rows.sort(key=lambda row: bool(row["same"]))
    return {"runs": [name for name, _ in known], "rows": rows}


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    gate = {f"gate.{name}": value for name, value in values["gate"].items()}
    return {name: value for name, value in values.items() if name != "gate"} | gate


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(_text(item) for item in value) or "none"
    if isinstance(value, dict):
        return "=".join(map(str, value.values()))
    return "automatic" if value is None else str(value)


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
