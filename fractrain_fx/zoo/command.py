"""The output of ``fractrain zoo``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fractrain_fx.durable import write_text
from fractrain_fx.errors import ConfigError
from fractrain_fx.summary.text import columns_or, fits
from fractrain_fx.training.log import new_console
from fractrain_fx.training.models import zoo_models
from fractrain_fx.zoo.comparison import compare
from fractrain_fx.zoo.edge import EDGE, edge_markdown, edge_rows, edge_table
from fractrain_fx.zoo.formats import FORMAT_RECIPES
from fractrain_fx.zoo.recipe import TABLES, load_recipe, load_recipes
from fractrain_fx.zoo.recipes import AS_THE_CODE, AS_THE_PAPER
from fractrain_fx.zoo.tables import comparison_lines, comparison_table, markdown_table, notes_of

__all__ = ["list_zoo", "show_recipe", "show_table"]

_EDGE = "edge"
_WIDTH = 170  # of a comparison outside a terminal


def list_zoo(*, as_json: bool = False) -> None:
    """Print all models, tables and runs of the paper, and the recipes of number formats."""
    recipes = load_recipes()
    models = [f"zoo:{name}" for name in zoo_models()]
    if as_json:
        names = {recipe.name: {"row": recipe.row, "tables": list(recipe.tables)} for recipe in recipes}
        formats = {name: recipe.to_dict() for name, recipe in FORMAT_RECIPES.items()}
        print(json.dumps({"models": models, "tables": TABLES | {_EDGE: EDGE}, "recipes": names, "formats": formats}))
        return
    console = new_console()
    for heading, rows in (
        ("models", [(name, "") for name in models]),
        ("tables", [*TABLES.items(), (_EDGE, EDGE)]),
        ("formats (--set format_recipe=NAME)", [_format_row(name) for name in FORMAT_RECIPES]),
        ("runs (fractrain train --recipe NAME)", [(recipe.name, recipe.row) for recipe in recipes]),
    ):
        table = Table(box=SIMPLE_HEAD, show_edge=False)
        table.add_column(heading, no_wrap=True)
        table.add_column("")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(
        f"Runs of dfq, fractrain and slu are there as NAME{AS_THE_PAPER} and NAME{AS_THE_CODE}, too: with the settings "
        "of the paper, and with those of the authors' code.",
        highlight=False,
    )


def _format_row(name: str) -> tuple[str, str]:
    item = FORMAT_RECIPES[name]
    return (
        name,
        f"format {item.recipe.format} at {item.precision}: cp {item.cp:.2f} %, scales {item.scales}; {item.source}",
    )


def show_recipe(name: str, *, as_json: bool = False) -> None:
    """Print one run of the paper, or one recipe of a number format, with all of its settings, as YAML or JSON.

    Raises:
        ConfigError: there is no recipe of that name.
    """
    values = FORMAT_RECIPES[name].to_dict() if name in FORMAT_RECIPES else load_recipe(name).to_dict()
    print(json.dumps(values) if as_json else yaml.safe_dump(values, sort_keys=False, width=_WIDTH), end="")
    if as_json:
        print()


def show_table(name: str, runs: Sequence[Path] = (), *, as_json: bool = False, into: Path | None = None) -> None:
    """Print a table of the paper beside computed and measured numbers.

    Args:
        name: a key of ``TABLES``, or ``edge``.
        runs: folders of finished runs.
        as_json: print JSON.
        into: a Markdown file, in which the text between ``<!-- table NAME -->`` and ``<!-- end -->`` is replaced.

    Raises:
        FracTrainError: the table is unknown, a folder has no run of a recipe, or the file lacks the marks.
    """
    if name == _EDGE:
        _show_edge(runs, as_json=as_json, into=into)
        return
    rows = compare(name, runs)
    if as_json:
        print(json.dumps([row.to_dict() for row in rows]))
    elif into is None:
        console = new_console()
        wide = console if console.is_terminal else Console(width=columns_or(_WIDTH))
        table = comparison_table(name, rows)
        for part in (table,) if fits(table, wide, wide.width) else comparison_lines(name, rows):
            wide.print(part, highlight=False)
        for note in notes_of(rows):
            wide.print(f"- {note}", highlight=False)
    else:
        _renew(into, name, markdown_table(rows))


def _show_edge(runs: Sequence[Path], *, as_json: bool, into: Path | None) -> None:
    if runs:
        raise ConfigError("the edge experiment is computed from recipes alone: leave out --runs")
    if as_json:
        print(json.dumps([asdict(row) for row in edge_rows()]))
    elif into is None:
        new_console().print(edge_table())
    else:
        _renew(into, _EDGE, edge_markdown())


def _renew(file: Path, name: str, table: str) -> None:
    marks = f"<!-- table {name} -->", "<!-- end -->"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    renewed, count = re.subn(
        f"({re.escape(marks[0])}\n).*?({re.escape(marks[1])})",
        lambda match: f"{match[1]}\n{table}\n{match[2]}",
        text,
        flags=re.DOTALL,
    )
    if not count:
        raise ConfigError(f"{file} has no place for table {name}: put {marks[0]} and {marks[1]} on lines of their own")
    write_text(file, renewed)
