"""The rows of the corpus in a file, and as a section of a page."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.coverage.corpus.trial import NO_WEIGHTS, NOT_DONE, PASSED, UNUSABLE, Row
from benchmarks.coverage.resized import DIFFERENT, ERROR, REFUSED
from benchmarks.coverage.results import without_paths
from benchmarks.page import markdown_table

__all__ = ["DIED", "NO_MODULES", "read_rows", "section", "short", "summary", "write_rows"]

DIED, NO_MODULES = "process died", "no modules"
_WAYS = {"verdict": "`fractrainify`, float", "export": "`torch.export`", "fullgraph": "`torch.compile(fullgraph=True)`"}
_VERDICTS = (PASSED, REFUSED, DIFFERENT, ERROR, NOT_DONE, DIED)
_CAUSE = 240


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; none if it does not exist."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Replace the file in one step."""
    part = path.with_suffix(".part")
    part.write_text(without_paths("".join(json.dumps(row) + "\n" for row in rows)), encoding="utf-8")
    os.replace(part, path)


def _usable(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["verdict"] not in (UNUSABLE, NO_MODULES) and row["index"] >= 0]


def summary(rows: Sequence[Row]) -> str:
    """A table: for each way to a graph, how many modules and projects pass, and what becomes of the others."""
    usable = _usable(rows)
    lines = []
    for way, title in _WAYS.items():
        counts = Counter(row.get(way, DIED) for row in usable)
        projects: dict[str, bool] = defaultdict(lambda: True)
        for row in usable:
            projects[row["project"]] &= row.get(way) == PASSED
        shares = (_share(counts[PASSED], len(usable)), _share(sum(projects.values()), len(projects)))
        lines.append([title, *shares, *(str(counts[verdict]) for verdict in _VERDICTS[1:])])
    return markdown_table(("way", "modules that pass", "projects that pass", *_VERDICTS[1:]), lines)


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / max(whole, 1):.1f} %)"


def section(rows: Sequence[Row]) -> str:
    """The part of a page about the corpus, from its rows alone."""
    if not rows:
        return "## Modules of public projects\n\nNo row of this data is from the corpus."
    usable = _usable(rows)
    steps = Counter(row.get("pfq") for row in usable)
    tried = sum(steps.values()) - steps[NO_WEIGHTS] - steps["not reached"] - steps[None]
    commits = Counter(row["commit"] for row in rows).most_common()
    return f"""\
## Modules of public projects

The [corpus](https://github.com/jansel/pytorch-jit-paritybench) holds modules of 2,000 projects on GitHub, with
arguments. A random sample of {len({row["project"] for row in rows})} projects was tried, and {len(usable)} of their
modules run here and give the same tensors twice. Each is put between two linear layers and rewritten with
`method="float"`. It passes if a training step and an evaluation are equal bit for bit. The other two ways pass if they
give a graph whose outputs in training are equal.

{summary(rows)}

{_share(steps[PASSED], tried)} of the modules with weights take a training step with `method="pfq"`.

{_causes(usable)}

Rows by commit: {", ".join(f"{n} at {c}" for c, n in commits)}. The data is `docs/results/corpus.jsonl`, made with
`python -m benchmarks.coverage.corpus FOLDER --projects N --out docs/results/corpus.jsonl --page
docs/measured/coverage.md`."""


def _causes(rows: Sequence[Row]) -> str:
    lines = [*_failed(rows, "verdict", str), *_failed(rows, "pfq", lambda verdict: f"{verdict}, under pfq")]
    if not lines:
        return "Every module passes."
    return markdown_table(("module", "verdict", "cause"), lines, text_columns=3)


def _failed(rows: Sequence[Mapping[str, str]], way: str, words: Callable[[str], str]) -> list[list[str]]:
    bad = [row for row in rows if row.get(way) in _VERDICTS[1:]]
    return [
        [f"{row['project']}/{row.get('name', '')}", words(row[way]), short(row.get(f"{way}_cause", ""))]
        for row in sorted(bad, key=lambda row: (row[way], row["project"]))
    ]


def short(cause: str) -> str:
    """A cause cut for a table."""
    return cause if len(cause) <= _CAUSE else cause[: _CAUSE - 3] + "..."
