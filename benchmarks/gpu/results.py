"""Results of the GPU benchmark: one JSON file for each machine, written after every row, and the page of all files."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import PARTS
from benchmarks.page import markdown_table, write_section
from benchmarks.records import Quartiles, machine_words, spread
from fractrain_fx.durable import write_text

__all__ = ["Found", "Results", "slug", "write_page"]

_NAME = "benchmarks.gpu"
_NONE = "There are no results yet: no GPU was at hand so far."


@dataclass
class Found:
    """The results of one part.

    Attributes:
        rows: the rows of each item that was run.
        not_run: why an item of the part has no rows. Each item has that reason until it is run.
        seconds: time that the part took.
    """

    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class Results:
    """The file of one machine.

    Attributes:
        path: the file.
        machine: what ran, from ``benchmarks.machine.describe``.
        command: the command line.
        parts: results by part.
    """

    path: Path
    machine: dict[str, str]
    command: str
    parts: dict[str, Found] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read a file."""
        held = json.loads(path.read_text(encoding="utf-8"))
        parts = {name: Found(**outcome) for name, outcome in held["parts"].items()}
        return cls(path, held["machine"], held["command"], parts)

    def save(self) -> None:
        """Replace the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        parts = {name: asdict(outcome) for name, outcome in self.parts.items()}
        held = {"machine": self.machine, "command": self.command, "parts": parts}
        write_text(self.path, json.dumps(held, indent=1) + "\n")


def slug(name: str) -> str:
    """A name as part of a file name: ``NVIDIA H200`` becomes ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def write_page(page: Path, folder: Path) -> None:
    """Write the tables of all results in a folder between the markers of a page."""
    page.parent.mkdir(parents=True, exist_ok=True)
    files = sorted(folder.glob("gpu-*.json"))
    parts = [markdown(Results.load(file)) for file in files]
    write_section(page, _NAME, "\n\n".join(parts or [_NONE]))


def markdown(results: Results) -> str:
    """A machine's tables."""
    name = results.machine.get("gpu", results.machine["processor"])
    text = [f"## {name}", f"`{results.command}`; {machine_words(results.machine)}."]
    for key, part in PARTS.items():
        if (outcome := results.parts.get(key)) is None:
            continue
        text += [f"### {part.title}: {name}", part.how, *_part(outcome)]
    return "\n\n".join(text)


def _part(outcome: Found) -> list[str]:
    rows = [row for item in outcome.rows.values() for row in item]
    text = [f"{outcome.seconds:.0f} s."]
    if rows:
        columns = [column for column in rows[0] if any(row[column] not in (None, "") for row in rows)]
        words = next(
            (place for place, column in enumerate(columns) if not isinstance(rows[0][column], str)), len(columns)
        )
        text.append(markdown_table(columns, ([_cell(row[column]) for column in columns] for row in rows), words))
    for reason in dict.fromkeys(outcome.not_run.values()):
        items = "; ".join(item for item, why in outcome.not_run.items() if why == reason)
        text.append(f"Not run ({reason}): {items}.")
    return text


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case [_, _, _]:  # JSON has turned quartiles into a list
            return spread(Quartiles(*value), 2)
        case float():
            return f"{value:.4g}"
    return str(value)
