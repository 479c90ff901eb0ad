"""The matrix of exports as a table: no cell without a number or a reason."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from benchmarks.export.matrix import FORMATS, PRECISIONS, Cell, table
from benchmarks.export.models import MODELS
from benchmarks.export.noted import as_noted_in_torchao, as_noted_in_transformers
from benchmarks.export.sizes import Size, size_table
from benchmarks.export.ties import Cause, cause_in_transformers
from fractrain_fx import Precision
from tests.deployable import llama, rewritten, vit


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


def test_a_difference_without_a_moved_code_is_not_called_a_tie() -> None:
    tie = Cause(2e-3, 100, ties=1, steps=1.0, from_middle=2e-5, same_codes=3e-7, moved_here=2e-3)
    others = [replace(tie, **changed) for changed in ({"ties": 0}, {"from_middle": 0.1}, {"same_codes": 1e-3})]
    cells = [Cell(model, precision, format, 0.0) for model in MODELS for precision in PRECISIONS for format in FORMATS]
    cells[0].difference, cells[0].cause = 2e-3, asdict(tie)
    assert "take the other one" in table(cells)
    for other in others:
        cells[0].cause = asdict(other)
        assert "the cause is not known" in table(cells) and "take the other one" not in table(cells)
    cells[0].cause, cells[0].notes, cells[0].as_noted = None, ["weights are the same"], 1e-7
    assert "the cause is not known" not in table(cells)
    cells[0].as_noted = 1e-2
    assert "the cause is not known" in table(cells)


def test_with_the_codes_of_a_file_evaluation_gives_its_outputs() -> None:
    pytest.importorskip("compressed_tensors", reason="needs the extra: pip install 'fractrain_fx[export]'")
    found = cause_in_transformers(rewritten(llama(), attention="float"))
    assert found.values > 0 and found.same_codes < 1e-5
    assert (found.ties > 0) == (found.moved_here > 0)


def test_the_notes_of_a_file_say_all_that_it_differs_by() -> None:
    pytest.importorskip("compressed_tensors", reason="needs the extra: pip install 'fractrain_fx[export]'")
    pytest.importorskip("torchao", reason="needs the extra: pip install 'fractrain_fx[export]'")
    four = rewritten(llama(), attention="float", format="nvfp4", precision=Precision(4, 4))
    assert as_noted_in_transformers(four) < 1e-5
    assert as_noted_in_torchao(rewritten(vit(), attention="float")) < 1e-5
