"""The results of a sweep as a Markdown page: counts for each suite, and the cause of every failure."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence

from benchmarks.coverage.corpus.page import section, short
from benchmarks.coverage.resized import DIFFERENT, REFUSED, summary
from benchmarks.coverage.results import Results
from benchmarks.coverage.sizes import Kind
from benchmarks.coverage.trial import CHECKS, DESCRIPTIONS, Row
from benchmarks.coverage.verdicts import NOT_BUILT, PASSED, group, verdict
from benchmarks.page import markdown_table

__all__ = ["markdown"]

_HOW = """
# Coverage

**{passed} of {built} models that could be built pass, and {different} are silently different.** A model passes if each
of the {checks} checks below was made and held.

{summary}

- **known**: models that the suite lists; **run**: models with a row in the data; **built**: models that this machine
  could build.
- **refused**: `fractrainify` raises an error of its own that names the place in the model.
- **silently different**: the rewritten model computes something else and raises no error. This must be 0.
- **failed**: a raw error, or a check that did not hold.
- **goal**: to pass, or for the suite `libraries` to pass or be refused. It holds models of other packages.
- **rewrite, s**: processor seconds of one thread for `fractrainify`, and **rewrite / step** as a multiple of one
  training step of the original on the same small batch.

## Search the data

[`docs/results/coverage.csv.gz`](../results/coverage.csv.gz) has one line for each model: verdict, failed check, cause,
MACs, blocks, shares, seconds, commit. From the root of the repository:

```python
import csv, gzip

with gzip.open("docs/results/coverage.csv.gz", "rt", newline="") as file:
    rows = list(csv.DictReader(file))
print(*[row["name"] for row in rows if row["verdict"] == "refused"], sep="\\n")
```

`docs/results/coverage.json.gz` holds the same rows with every check, note and kept module. `make coverage` runs the
sweep and writes this page; `make coverage-libraries` does the same for the suite of libraries.

## What does not pass

{failures}

### Models that could not be built

{not_built}

<!-- corpus -->

{corpus}

<!-- /corpus -->

## Other sizes

The check "sizes" calls the float rewrite with other sizes than the recorded ones. Each call must equal the original bit
for bit, or be refused. "Tied" models are refused at every other size. Sizes that the original refuses do not count.

{sizes}

## The checks

Models have random weights and are built small, without a download. Each goes through the checks in a process of its
own. torchvision's detectors decide by values what they compute, so their backbones are counted instead.

{descriptions}

## Versions

{states}
"""


def markdown(results: Results, corpus: Sequence[Row] = ()) -> str:
    """The whole page, from the results and the rows of the corpus alone."""
    suites: dict[str, list[Row]] = defaultdict(list)
    for _, row in sorted(results.rows.items()):
        suites[row["suite"]].append(row)
    counts = Counter(map(verdict, results.rows.values()))
    page = _HOW.format(
        passed=counts[PASSED],
        built=counts.total() - counts[NOT_BUILT],
        different=counts[DIFFERENT],
        checks=len(CHECKS),
        summary=markdown_table(_SUMMARY, (_summary(s, results.known.get(s), suites[s]) for s in sorted(suites))),
        states=_states(results, suites),
        descriptions=markdown_table(("check", "it holds if"), map(_described, CHECKS), text_columns=2),
        sizes=_sizes(suites),
        failures="\n\n".join(filter(None, (_failures(s, suites[s]) for s in sorted(suites)))) or "Every model passes.",
        not_built=_not_built(suites),
        corpus=section(corpus),
    )
    return page.lstrip()


def _described(check: str) -> tuple[str, str]:
    return check.replace("_", " "), DESCRIPTIONS[check]


_SUMMARY = (
    *("suite", "known", "run", "built", "pass", REFUSED, DIFFERENT, "failed", "goal reached, of built"),
    *("rewrite, s: median", "rewrite / step: median", "largest"),
)


def _summary(suite: str, known: int | None, rows: Sequence[Row]) -> list[str]:
    counts = Counter(map(verdict, rows))
    built = len(rows) - counts[NOT_BUILT]
    good, refused, different = counts[PASSED], counts[REFUSED], counts[DIFFERENT]
    reached = good + (refused if suite == "libraries" else 0)
    return [
        suite,
        str(known or ""),
        *map(str, (len(rows), built, good, refused, different, built - good - refused - different)),
        f"{100 * reached / max(built, 1):.1f} %",
        *_times([row for row in rows if verdict(row) == PASSED]),
    ]


def _times(rows: Sequence[Row]) -> list[str]:
    """The median time of a rewrite, and its median and largest ratio to a training step."""
    if not rows:
        return ["", "", ""]
    # The processor's clock can stand still during a step of a tiny model.
    ratios = {row["name"]: row["seconds"]["rewrite"] / max(row["seconds"]["step"], 0.004) for row in rows}
    slowest = max(ratios, key=lambda name: ratios[name])
    return [
        f"{statistics.median(row['seconds']['rewrite'] for row in rows):.2f}",
        f"{statistics.median(ratios.values()):.1f}",
        f"{ratios[slowest]:.0f} ({slowest})",
    ]


def _states(results: Results, suites: dict[str, list[Row]]) -> str:
    """The versions and commits behind the rows, and the number of other libraries."""
    parts = ["Made with " + ", ".join(f"{name} {version}" for name, version in results.made_with.items()) + "."]
    for suite in sorted(suites):
        counts = Counter(row.get("commit", "unknown") for row in suites[suite])
        parts.append(f"Rows of {suite} by commit: " + ", ".join(f"{n} at {c}" for c, n in counts.most_common()) + ".")
    hows = [row.get("how", {}) for rows in suites.values() for row in rows]
    if libraries := {how["library"] for how in hows if "library" in how}:
        parts.append(f"Models of {len(libraries)} libraries, whose releases are in the data.")
    return " ".join(parts)


_KINDS: dict[str, tuple[Kind, ...]] = {"batch sizes": ("batch",), "lengths and image sizes": ("length", "image")}


def _sizes(suites: dict[str, list[Row]]) -> str:
    """How many models equal their originals at other sizes, and how many are tied to the recorded size."""
    lines = []
    for suite in sorted(suites):
        checked = [row["sizes"] for row in suites[suite] if "sizes" in row]
        for what, kinds in _KINDS.items() if checked else ():
            counts = Counter(word for sizes in checked if (word := summary(sizes, *kinds)))
            lines.append([suite, what, ", ".join(f"{n} {word}" for word, n in counts.most_common()) or "none"])
    if not lines:
        return "No row of this data has been through the check."
    return markdown_table(("suite", "other", "models"), lines, text_columns=3)


def _failures(suite: str, rows: Sequence[Row]) -> str:
    failed = [row for row in rows if verdict(row) not in (PASSED, NOT_BUILT)]
    failed.sort(key=lambda row: (verdict(row), row["name"]))
    lines = [
        [row["name"], row["failed_at"].replace("_", " "), verdict(row), short(row.get("cause", ""))] for row in failed
    ]
    head = ("model", "check", "verdict", "cause")
    return f"### {suite}\n\n{markdown_table(head, lines, text_columns=4)}" if failed else ""


def _not_built(suites: dict[str, list[Row]]) -> str:
    """The models that could not be built, counted by cause."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for suite, rows in suites.items():
        for row in rows:
            if verdict(row) == NOT_BUILT:
                groups[suite, group(row.get("cause", ""))].append(row["name"])
    if not groups:
        return "Every model was built."
    order = sorted(groups, key=lambda key: (key[0], -len(groups[key]), key[1]))
    lines = [[suite, cause, str(len(groups[suite, cause])), _some(groups[suite, cause])] for suite, cause in order]
    return markdown_table(("suite", "cause", "models", "for example"), lines, text_columns=4)


def _some(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
