"""Code that all benchmarks share: medians with quartiles, ratios inside a round, JSON files, command lines."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.table import Table

__all__ = [
    "Quartiles",
    "command",
    "load_rows",
    "machine_words",
    "quartiles",
    "ratios",
    "read_json",
    "rich_table",
    "spread",
    "write_json",
]

_Row = TypeVar("_Row")


class Quartiles(NamedTuple):
    """The median of some numbers, and the range of their middle half."""

    median: float
    low: float
    high: float


def quartiles(values: Sequence[float]) -> Quartiles:
    """Median and quartiles (inclusive method) of one value or more."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(median, low, high)


def ratios(times: Mapping[str, Sequence[float]], name: str, base: str) -> Quartiles:
    """Quartiles of the ratio of two methods' times, round by round, so that a slow round cancels."""
    return quartiles([mine / other for mine, other in zip(times[name], times[base], strict=True)])


def command(program: str, argv: Sequence[str], places: Iterable[str] = ("--json", "--table")) -> str:
    """The command line that gives these numbers again, without the options ``places`` for output files."""
    places = set(places)
    kept = [
        word
        for index, word in enumerate(argv)
        if word.split("=")[0] not in places and (not index or argv[index - 1] not in places)
    ]
    return shlex.join(["python", "-m", program, *kept])


def machine_words(machine: Mapping[str, str]) -> str:
    """The result of ``benchmarks.machine.describe`` as part of a sentence."""
    return ", ".join(f"{name} {value}" for name, value in machine.items())


def spread(values: Quartiles | None, digits: int) -> str:
    """``median (low-high)``; empty for ``None``."""
    return f"{values.median:.{digits}f} ({values.low:.{digits}f}-{values.high:.{digits}f})" if values else ""


def rich_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> Table:
    """A table for the terminal; all columns except the first ``text_columns`` are aligned to the right."""
    table = Table(title=title)
    for index, column in enumerate(head):
        is_text = index < text_columns
        table.add_column(column, justify="left" if is_text else "right", no_wrap=is_text)
    for row in rows:
        table.add_row(*row)
    return table


def write_json(path: Path, runs: Mapping[str, Any]) -> None:
    """Replace a file by runs by name, each a dataclass; gzip if its name ends with ``.gz``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({name: asdict(run) for name, run in runs.items()}, indent=1).encode()
    part = path.with_suffix(".part")
    part.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    os.replace(part, path)


def read_json(path: Path) -> dict[str, dict[str, Any]]:
    """Read a file of :func:`write_json` as plain values; empty if there is no file."""
    if not path.exists():
        return {}
    data = path.read_bytes()
    held: dict[str, dict[str, Any]] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return held


def load_rows(kind: type[_Row], rows: Iterable[Mapping[str, Any]]) -> list[_Row]:
    """Rows of a dataclass from plain values, in which JSON has turned quartiles into lists."""
    spreads = {field.name for field in fields(kind) if "Quartiles" in str(field.type)}  # type: ignore[arg-type]
    return [
        kind(**{name: Quartiles(*value) if name in spreads and value else value for name, value in row.items()})
        for row in rows
    ]
