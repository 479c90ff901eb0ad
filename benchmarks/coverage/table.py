"""The results of a sweep as a Markdown page: counts, every failure with its cause, and a row for each model."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.coverage.resized import DIFFERENT, REFUSED, summary
from benchmarks.coverage.results import Results
from benchmarks.coverage.sizes import Kind
from benchmarks.coverage.trial import CHECKS, Row, passed

__all__ = ["markdown"]

_HOW = """
# Coverage

Each model is built from its name or a configuration with random weights, never downloaded, and put through these
checks in a process of its own: {checks}. A model passes if every one of them was made and held; a check behind one that
failed is "not reached", which is no pass. What the checks are stands in
[`benchmarks/coverage/trial`](../benchmarks/coverage/trial); `make coverage` makes this page, and a sweep of one
library only that library's part.

Models are cut where their library lets them be: timm's in depth, width and image size, Hugging Face's by their
configurations, torchvision's in image size, and in depth the few that do not fit into memory. torchvision's detectors
are no graphs, as values decide what they compute; their backbones, which the error names as what to rewrite instead,
are counted beside them. The suite of libraries is of other people's packages that this project does nothing for:
models of small configurations in
[`benchmarks/coverage/libraries`](../benchmarks/coverage/libraries/__init__.py), run by `make coverage-libraries`.

The check "sizes" calls the float rewrite with 1, n + 1 and 2n + 1 samples, and with sequences and images that are
smaller and larger than the recorded ones, in evaluation and training. It holds where every call is equal to the
original's bit for bit, or refused with an error that says why; what the original itself does not take counts for
nothing. "Tied" is a model that is refused at every other size.

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
    parts += [line for line in (_libraries(rows), _sizes(rows), _verdicts(rows)) if line]
    failed = [row for row in rows if not passed(row)]
    if failed:
        parts += ["### What does not pass", _table(("model", "check", "cause"), map(_failure, failed))]
    return "\n\n".join([*parts, "### What passes", _table(_MODEL, (_model(row) for row in rows if passed(row)))])


def _libraries(rows: Sequence[Row]) -> str:
    """The releases of what the suite of libraries took its models from."""
    found = {row["how"]["library"]: row["how"]["release"] for row in rows if "library" in row.get("how", {})}
    words = ", ".join(f"{library} {release}" for library, release in sorted(found.items()))
    return f"Models of {len(found)} libraries: {words}." if found else ""


def _sizes(rows: Sequence[Row]) -> str:
    """How many models are equal to their originals at other sizes, and how many are tied to the recorded one."""
    checked = [row["sizes"] for row in rows if "sizes" in row]
    if not checked:
        return ""
    parts = []
    for what, kinds in _KINDS.items():
        counts = Counter(word for sizes in checked if (word := summary(sizes, *kinds)))
        parts.append(f"At other {what}: " + (", ".join(f"{n} {word}" for word, n in counts.most_common()) or "none"))
    return ". ".join(parts) + f". Looked at in {len(checked)} models, of which some take no other size themselves."


def _verdicts(rows: Sequence[Row]) -> str:
    """Of what is built and does not pass, how much is refused in words, and how much is wrong without a word."""
    failed = [row for row in rows if not passed(row) and row["checks"].get("build") == "passed" and "verdict" in row]
    counts = Counter(row["verdict"] for row in failed)
    if not failed:
        return ""
    other = len(failed) - counts[REFUSED] - counts[DIFFERENT]
    return (
        f"Of the {len(failed)} models that are built and do not pass, {counts[REFUSED]} are refused when they are "
        f"recorded, {counts[DIFFERENT]} compute something else silently, and {other} fail in another way."
    )


_KINDS: dict[str, tuple[Kind, ...]] = {"batch sizes": ("batch",), "lengths and image sizes": ("length", "image")}
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
    *("gated", "float", "uncounted ops", "leaves", *(f"other {what}" for what in _KINDS)),
    *("capture, s", "rewrite, s"),
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
        *(summary(row.get("sizes", {}), *kinds) for kinds in _KINDS.values()),
        f"{row['seconds']['capture']:.2f}",
        f"{row['seconds']['rewrite']:.2f}",
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(map(_line, [head, ["---"] * len(head), *rows]))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
