"""The matrix of exports as a table: no cell without a number or a reason."""

from __future__ import annotations

from benchmarks.export.matrix import FORMATS, PRECISIONS, Cell, table
from benchmarks.export.models import MODELS
from benchmarks.export.sizes import Size, size_table


def test_every_cell_has_a_difference_or_a_reason_that_is_listed_once() -> None:
    cells = [
        Cell(
            model,
            precision,
            format,
            *((None, f"layers.{n}.fc is no layer") if format == "torchao" else (0.25 * n, None)),
        )
        for n, (model, precision) in enumerate((m, p) for m in MODELS for p in PRECISIONS)
        for format in FORMATS
    ]
    cells[0].notes = ["weights are the same"]
    lines = table(cells).splitlines()
    assert len([line for line in lines if line.startswith("| ") and "---" not in line]) == 1 + 49
    assert "0 (1)" in lines[2] and "refused (2)" in lines[2]
    assert lines[-2:] == ["1. weights are the same", "2. An op is no layer"]


def test_sizes_are_shares_of_float32() -> None:
    text = size_table([Size("net", "float32", 1.0, 1.0), Size("net", "int8 exact", 0.2571)])
    assert "| net | float32 | 1.000 | 1.00 |" in text and "| net | int8 exact | 0.257 |  |" in text
