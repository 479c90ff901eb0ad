"""The results of a sweep as a Markdown page: counts, every failure with its cause, and a row for each model."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from benchmarks.coverage.results import Results
from benchmarks.coverage.trial import CHECKS, Row, passed

__all__ = ["markdown"]

_HOW = """
Each model is built from its name or a configuration with random weights, never downloaded, and put through these
checks in a process of its own: {checks}. A model passes if every one of them was made and held; a check behind one that
failed is "not reached", which is no pass. What the checks are stands in
[`benchmarks/coverage/trial.py`](../benchmarks/coverage/trial.py); `make coverage` makes this page.

Times are processor seconds of one thread, the libraries loaded: "capture" is both modes written down as a graph,
"rewrite" all that `fractrainify` does: capture, the comparison with the model, every pass.
"""


def markdown(results: Results) -> str:
    """The whole page."""
    rows = results.rows
    suites = sorted({row["suite"] for row in rows.values()})
    parts = ["# Coverage", _HOW.format(checks=", ".join(name.replace("_", " ") for name in CHECKS)).strip()]
    parts.append("Made with " + ", ".join(f"{name} {version}" for name, version in results.made_with.items()) + ".")
    parts.append(
        _table(
            _SUMMARY,
            [_summary(suite, str(results.known.get(suite, "")), _of(rows.values(), suite)) for suite in suites],
        )
    )
    parts.append(_states(rows.values(), suites))
    for suite in suites:
        failed = [row for row in _of(rows.values(), suite) if not passed(row)]
        if failed:
            parts += [f"## {suite}: what does not pass", _table(("model", "check", "cause"), map(_failure, failed))]
    for suite in suites:
        good = [row for row in _of(rows.values(), suite) if passed(row)]
        parts += [f"## {suite}: what passes", _table(_MODEL, map(_model, good))]
    return "\n\n".join(parts) + "\n"


def _states(rows: Iterable[Row], suites: Sequence[str]) -> str:
    """By which states of the code the rows were made."""
    counts = {suite: Counter(row.get("commit", "unknown") for row in _of(rows, suite)) for suite in suites}
    told = [
        f"{suite}: " + ", ".join(f"{n} at {commit}" for commit, n in counts[suite].most_common()) for suite in suites
    ]
    return "Rows by the commit that made them: " + "; ".join(told) + "."


def _of(rows: Iterable[Row], suite: str) -> list[Row]:
    return [row for row in rows if row["suite"] == suite]


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
    return [row["name"], row.get("failed_at", "").replace("_", " "), cause[:300]]


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
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )
