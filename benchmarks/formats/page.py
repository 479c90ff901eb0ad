"""docs/measured/format-results.md, made of docs/results/formats.jsonl: what each recipe reaches for its cost."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.page import markdown_table
from benchmarks.science.cells import mean_and_range, signed
from benchmarks.science.figures import write_figures
from benchmarks.science.named import METHODS, TASKS
from benchmarks.science.records import Group, Record, difference, groups_of
from fractrain_fx.config import SCALE_BITS
from fractrain_fx.zoo.formats import FORMAT_RECIPES

__all__ = ["write_page"]

_INTRO = """# Number formats side by side

**Every [recipe](../reference/format-recipes.md) trains these small models, and MXFP4 that rises to MXFP8 by itself
ends as well as MXFP8.** The models are too small to rank formats for large ones. In the short runs seeds differ as much
as most recipes do.

```bash
python -m benchmarks.formats run --data-dir DIR # trains
python -m benchmarks.formats page # writes this page from the results
```

- **last**: test {metric} at the end; over several seeds the mean, with the lowest and highest in brackets.
- **to mxfp8**: last, less that of `mxfp8`, in points or for language in nats (less is better).
- **MACs**: cost of the whole training in full-precision multiply-accumulates, without the bits of **scales**.
- **raised after**: share of the run after which the bits went up.

[The results]({results}) have a line for each run, with its machine.
"""
_HEAD = ("recipe", "bits", "scales", "seeds", "last", "to mxfp8", "MACs", "of mxfp8's", "raised after")


def write_page(page: Path, results: Path, records: Sequence[Record]) -> None:
    """Write the page, and its figures beside the results."""
    place = Path(os.path.relpath(results, page.parent))
    groups = groups_of(records)
    metrics = sorted({record["metric"] for record in records})
    parts = [_INTRO.format(results=place, metric=" or ".join(metrics) or "accuracy")]
    for task in (name for name in TASKS if any(group.task == name for group in groups)):
        mine = sorted((group for group in groups if group.task == task), key=_order)
        loop = ", ".join(f"`{name}` {value}" for name, value in TASKS[task].items())
        parts += [f"## {task}", f"{loop}, {_lengths(mine)}.", _table(mine)]
        figures = write_figures(results.parent, task, mine, "formats")
        parts += [f"![{words}]({place.parent / path.name})" for path, words in figures]
    page.write_text("\n\n".join(part.strip() for part in parts if part) + "\n", encoding="utf-8")


def _order(group: Group) -> tuple[Any, ...]:
    return list(METHODS).index(group.method), -group.epochs


def _lengths(groups: Sequence[Group]) -> str:
    return " and ".join(f"{length} epochs" for length in sorted({group.epochs for group in groups}))


def _table(groups: Sequence[Group]) -> str:
    bases = {group.epochs: group for group in groups if group.method == "mxfp8"}
    rows = []
    for group in groups:
        macs, base = group.mean("total_macs"), bases.get(group.epochs)
        values = group.records[0]["values"]
        raised = [share for share in map(_raised_after, group.records) if share is not None]
        rows.append(
            (
                group.method,
                str(values.get("precision", values.get("stages", "float"))),
                _scales(group.method, values),
                str(len(group.records)),
                mean_and_range(group.values("value")),
                signed(difference(group, base), group.metric),
                f"{macs:.3e}",
                f"{100 * macs / base.mean('total_macs'):.0f} %" if base else "",
                f"{100 * statistics.mean(raised):.0f} %" if raised else "",
            )
        )
    return markdown_table(_HEAD, rows, text_columns=3)


def _scales(method: str, values: dict[str, Any]) -> str:
    if method in FORMAT_RECIPES:
        return FORMAT_RECIPES[method].scales
    return "" if values.get("precision") == "FW-16/BW-16" else SCALE_BITS.get(values.get("format", ""), "")


def _raised_after(record: Record) -> float | None:
    """The share of a run's steps after which its bits went up."""
    levels = [pair for point in record["points"] for pair in point["levels"]]
    first, (last, _) = levels[0][1], levels[-1]
    before = [step for step, level in levels if level == first]
    return None if len(before) == len(levels) else before[-1] / last
