"""The comparison of number formats: its grids cover every recipe, and the page says what the runs show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.formats.__main__ import FORMATS
from benchmarks.formats.page import write_page
from benchmarks.science.__main__ import main
from benchmarks.science.grid import GRIDS, Run
from benchmarks.science.records import merge_records, read_records
from fractrain_fx.config import RECIPES


def record(
    method: str,
    value: float,
    macs: float,
    seed: int = 0,
    switch: float | None = None,
    task: str = "characters-short",
) -> dict[str, Any]:
    run = Run(task, method, "default", 20, seed)
    levels = ["FW-4/BW-4" if switch is not None and epoch < 20 * switch else "FW-8/BW-8" for epoch in range(20)]
    points = [
        {"epoch": 1 + epoch, "value": value, "level": level, "levels": [[30 * (1 + epoch), level]]}
        for epoch, level in enumerate(levels)
    ]
    metric = "accuracy" if task.startswith("resnet") else "perplexity"
    outcome = {"metric": metric, "value": value, "best": value, "total_macs": macs, "points": points}
    return {**vars(run), **outcome, "values": run.values, "made_with": {"torch": "2"}}


def test_both_models_meet_every_recipe() -> None:
    for task in ("characters-short", "resnet20-short"):
        assert {run.method for run in GRIDS["formats"] if run.task == task} == {"float", "bf16", *RECIPES}


def test_the_page_has_bits_scales_seeds_and_the_place_of_the_raise(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    results, page = tmp_path / "results" / "formats.jsonl", tmp_path / "format-results.md"
    records = [record("mxfp8", 10.0, 2e9), record("nvfp4", 11.0, 1e9), record("nvfp4", 11.2, 1e9, 1)]
    merge_records(results, [*records, record("mxfp4-75-mxfp8", 10.0, 1e9, 0, 0.75)])
    write_page(page, results, read_records(results))
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    nvfp4, raised = (next(row for row in rows if row.startswith(f"| {name} |")) for name in ("nvfp4", "mxfp4-75-mxfp8"))
    assert "| FW-4/BW-4 | 8 bits for 16 values | 2 | 11.10 (11.00 to 11.20) | +0.104 | 1.000e+09 | 50 % |" in nvfp4
    assert raised.endswith("| 75 % |") and "FW(4,4,4,8)/BW(4,4,4,8)" in raised
    assert (tmp_path / "results" / "formats-characters-short-cost.svg").is_file()


def test_without_a_grid_all_of_them_are_meant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = [f"--runs={tmp_path}", f"--results={tmp_path}/formats.jsonl", f"--page={tmp_path}/page.md"]
    assert main(["list", *places], FORMATS) == 0
    names = [line.split()[-1] for line in capsys.readouterr().out.splitlines()]
    assert names == [run.name for run in dict.fromkeys([*GRIDS["formats"], *GRIDS["raise"]])]
    assert main(["list", "--task", "resnet20-short", "--method", "mxfp4", "--epochs", "6", *places], FORMATS) == 0
    assert "resnet20-short-mxfp4-default-6epochs-seed0" in capsys.readouterr().out
