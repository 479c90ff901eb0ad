"""The results of a sweep as a Markdown page: counts, every failure with its cause, and a row for each model."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.coverage.results import Results
from benchmarks.coverage.trial import CHECKS, Row, passed

__all__ = ["markdown"]

_HOW = """
# Coverage

Each model is built from its name or a configuration with random weights, never downloaded, and put through these
checks in a process of its own: {checks}. A model passes if every one of them was made and held; a check behind one that
failed is "not reached", which is no pass. What the checks are stands in
[`benchmarks/coverage/trial.py`](../benchmarks/coverage/trial.py); `make coverage` makes this page, and a sweep of one
library only that library's part.

Models are cut where their library lets them be: timm's in depth, width and image size, Hugging Face's by their
configurations, torchvision's in image size, and in depth the few that do not fit into memory. torchvision's detectors
are no graphs, as values decide what they compute; their backbones, which the error names as what to rewrite instead,
are counted beside them.

Times are processor seconds of one thread, the libraries loaded: "capture" is both modes written down as a graph,
"rewrite" all that `fractrainify` does: capture, the comparison with the model, every pass.
"""
_HEADING = re.compile(r"^## (\w+)\n", re.MULTILINE)


def markdown(results: Results, before: str = "") -> str:
    """The whole page.

    Args:
        results: what they hold no model of stays as it stands.
        before: the page as it was.
    """
    suites = {row["suite"] for row in results.rows.values()}
    lines, sections = _kept(before)
    for suite in suites:
        rows = [row for row in results.rows.values() if row["suite"] == suite]
        lines[suite] = _line(_summary(suite, str(results.known.get(suite, "")), rows))
        sections[suite] = _section(rows, results.made_with)
    intro = _HOW.format(checks=", ".join(name.replace("_", " ") for name in CHECKS)).strip()
    summary = "\n".join([_table(_SUMMARY, ()), *(lines[suite] for suite in sorted(lines))])
    parts = [intro, summary, *(f"## {suite}\n\n{sections[suite]}" for suite in sorted(sections))]
    return "\n\n".join(parts) + "\n"


def _kept(page: str) -> tuple[dict[str, str], dict[str, str]]:
    """The line of each library in the summary of a page, and its part of the page."""
    intro, *parts = _HEADING.split(page)
    sections = {suite: text.strip() for suite, text in zip(parts[::2], parts[1::2], strict=True)}
    lines = {line.split("|")[1].strip(): line for line in intro.splitlines() if line.startswith("| ")}
    return {suite: lines[suite] for suite in sections}, sections


def _section(rows: Sequence[Row], made_with: Mapping[str, str]) -> str:
    """Who made the rows, what does not pass and why, and what passes."""
    counts = Counter(row.get("commit", "unknown") for row in rows)
    states = ", ".join(f"{n} at {commit}" for commit, n in counts.most_common())
    versions = ", ".join(f"{name} {version}" for name, version in made_with.items())
    parts = [f"Made with {versions}. Rows by the commit that made them: {states}."]
    failed = [row for row in rows if not passed(row)]
    if failed:
        parts += ["### What does not pass", _table(("model", "check", "cause"), map(_failure, failed))]
    return "\n\n".join([*parts, "### What passes", _table(_MODEL, (_model(row) for row in rows if passed(row)))])


_SUMMARY = ("suite", "known", "run", "built", "pass", "of those built", "capture, s (median)", "rewrite, s (median)")


def _summary(suite: str, known: str, rows: Sequence[Row]) -> list[str]:
    built = [row for row in rows if row["checks"].get("build") == "passed"]
    good = [row for row in rows if passed(row)]
    return [
        suite,
        known,
        str(len(rows)),
        str(len(built)),
        str(len(good)),
        f"{100 * len(good) / max(len(built), 1):.1f} %",
        *(_median(good, name) for name in ("capture", "rewrite")),
    ]


def _median(rows: Sequence[Row], name: str) -> str:
    return f"{statistics.median(row['seconds'][name] for row in rows):.2f}" if rows else ""


# Where packages and temporary files lie is this machine's own affair.
_FOLDERS = re.compile(r"/\S*?/site-packages/|/tmp/\S+?(?=[\s,;:]|$)")


def _failure(row: Row) -> list[str]:
    cause = _FOLDERS.sub(lambda found: "" if found[0].endswith("/site-packages/") else "a folder", row.get("cause", ""))
    return [row["name"], row.get("failed_at", "").replace("_", " "), cause[:400]]


_MODEL = (
    *("model", "nodes", "contractions", "MMACs", "blocks: identity / projection / no skip"),
    *("gated", "float", "uncounted ops", "leaves", "capture, s", "rewrite, s"),
)


def _model(row: Row) -> list[str]:
    blocks, shares = row["blocks"], row["shares"]
    return [
        row["name"],
        str(row["nodes"]),
        str(row["contractions"]),
        f"{row['macs'] / 1e6:.1f}",
        " / ".join(str(blocks.get(skip, 0)) for skip in ("identity", "projection", "none")),
        f"{100 * shares['gated']:.0f} %",
        f"{100 * shares['float']:.0f} %",
        ", ".join(f"{count} {kind}" for kind, count in row["uncounted"].items()),
        str(sum(leaf["count"] for leaf in row["leaves"]) or ""),
        f"{row['seconds']['capture']:.2f}",
        f"{row['seconds']['rewrite']:.2f}",
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(map(_line, [head, ["---"] * len(head), *rows]))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
