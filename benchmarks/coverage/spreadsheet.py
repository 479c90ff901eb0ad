"""The rows of a sweep as a packed CSV file with one line for each model: the form that is easy to search."""

from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path
from typing import Any

from benchmarks.coverage.resized import summary
from benchmarks.coverage.results import Results
from benchmarks.coverage.trial import Row
from benchmarks.coverage.verdicts import verdict

__all__ = ["beside", "write_csv"]


def beside(results: Path) -> Path:
    """The path of the CSV file that belongs to a JSON file of results."""
    return results.with_name(results.name.split(".")[0] + ".csv.gz")


def write_csv(results: Results, path: Path) -> None:
    """Write one line for each model. Shares are of all MACs, times are processor seconds of one thread."""
    lines = [_line(row) for _, row in sorted(results.rows.items())]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(_line({"suite": "", "name": "", "checks": {}})), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def _line(row: Row) -> dict[str, Any]:
    blocks, shares, seconds, sizes = (row.get(name, {}) for name in ("blocks", "shares", "seconds", "sizes"))
    return {
        "suite": row["suite"],
        "name": row["name"],
        "verdict": verdict(row),
        "failed_check": row.get("failed_at", ""),
        "cause": row.get("cause", ""),
        "parameters": row.get("parameters", ""),
        "contractions": row.get("contractions", ""),
        "macs": row.get("macs", ""),
        **{f"blocks_{skip}": blocks.get(skip, 0 if blocks else "") for skip in ("identity", "projection", "none")},
        **{f"share_{mode}": shares.get(mode, "") for mode in ("gated", "scheduled", "pinned", "float")},
        "other_batch_sizes": summary(sizes, "batch"),
        "other_lengths_and_images": summary(sizes, "length", "image"),
        **{f"{name}_s": seconds.get(name, "") for name in ("step", "capture", "rewrite")},
        "commit": row.get("commit", ""),
    }
