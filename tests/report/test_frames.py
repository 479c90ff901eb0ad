"""The tables behind the plots against what the run wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fractrain_fx.cli import main
from fractrain_fx.report import frames
from fractrain_fx.report.runs import Run, read_run, read_runs
from tests.report.conftest import QUICK
from tests.report.made import make_run


@pytest.fixture(scope="module")
def runs(trained: Path) -> list[Run]:
    return read_runs([str(trained / name) for name in ("fractrain", "pfq", "static")])


def test_epochs_are_those_of_the_metrics(runs: list[Run]) -> None:
    rows = frames.epoch_rows(runs)
    written = [json.loads(line) for run in runs for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == len(written) == 12
    for row, line in zip(rows, written, strict=True):
        assert (row["epoch"], row["loss"], row["value"]) == (line["epoch"], line["loss"], line["test_accuracy"])
        assert (row["macs"], row["cp"], row["cp_total"]) == (
            line["total_macs"],
            100 * line["cp"],
            100 * line["cp_total"],
        )
    assert [row["target"] for row in rows if row["run"] == "pfq"] == [None] * 4


def test_bitfusion_cost_of_the_epochs_adds_up_to_the_results(runs: list[Run]) -> None:
    for run in runs:
        assert run.result is not None
        last = frames.epoch_rows([run])[-1]
        assert last["joules"] == pytest.approx(run.result.energy)
        assert last["bitfusion_seconds"] == pytest.approx(run.result.latency)


def test_blocks_and_paths_add_up_to_the_total(runs: list[Run]) -> None:
    for run in runs:
        assert run.result is not None
        total = run.result.hardware["end"]["total"]
        for rows in (frames.path_rows([run], "end"), frames.block_rows(run, "end")):
            assert {row["path"] for row in rows} == set(frames.PATHS.values())
            for quantity in frames.QUANTITIES:
                assert sum(row[quantity] for row in rows) == pytest.approx(total[quantity])


def test_stages_are_measured_by_their_steps(runs: list[Run]) -> None:
    rows = frames.stage_rows(runs)
    assert next(row["stage"] for row in rows if row["run"] == "pfq") == "1: FW-3/BW-6"
    for run in runs:
        mine = [row for row in rows if row["run"] == run.name]
        train = sum(record.train_seconds for record in run.records)
        assert sum(row["measured_step"] * row["epochs"] * 2 for row in mine) == pytest.approx(1e3 * train)  # 2 steps
        assert sum(row["epochs"] * row["epoch_seconds"] for row in mine) == pytest.approx(run.records[-1].seconds)
        assert train < run.records[-1].seconds


def test_allocations_are_the_options_of_the_metrics(tmp_path: Path) -> None:
    make_run(tmp_path / "run", epochs=8)
    run = read_run(tmp_path / "run")
    every = frames.allocation_rows(run)
    assert {row["epoch"] for row in every} == set(range(1, 9))
    rows = [row for row in every if row["epoch"] == 5]
    assert len({row["block"] for row in rows}) == 36
    shares = run.records[4].row.options["layer2.3"]
    assert [row["share"] for row in rows if row["block"] == "layer2.3"] == [100 * share for share in shares]
    bits = [row["bits"] for row in frames.bits_rows(run) if row["epoch"] == 5 and row["block"] == "layer2.3"]
    assert bits == [pytest.approx(sum(b * s for b, s in zip((0, 2, 3, 4, 4, 6, 6), shares, strict=True)))]


def test_stages_that_share_an_epoch_have_their_own_costs(tmp_path: Path) -> None:
    turns = ["--set", "schedule.every=1 steps", "--set", "schedule.turns=[0.25]", "--schedule", "fixed"]
    turns += ["--stages", "FW(4,8)/BW(4,8)"]
    loop = [*QUICK, "--subset", "128", "--epochs", "1", "--method", "pfq", "--out", str(tmp_path / "run")]
    assert main(["train", *loop, *turns]) == 0
    run = read_run(tmp_path / "run")
    assert [(stage.first, stage.last) for stage in run.stages] == [(1, 1), (1, 1)]
    first, second = frames.stage_rows([run])
    assert (first["stage"], second["stage"]) == ("1: FW-4/BW-4", "2: FW-8/BW-8")
    assert (first["cp"], second["cp"]) == pytest.approx((1.5625, 6.25))
    assert first["measured_step"] == pytest.approx(second["measured_step"])  # one measurement, divided
    spent = run.result.hardware["end"]["total"]["joules"] if run.result else 0.0
    assert first["joules_step"] + 3 * second["joules_step"] == pytest.approx(spent)


def test_machines_are_those_of_the_result_beside_float(runs: list[Run]) -> None:
    rows = frames.machine_rows(runs)
    assert len(rows) == 3 * 10 and [row["run"] for row in rows[:3]] == ["fractrain", "pfq", "static"]
    for run in runs:
        assert run.result is not None
        mine = {row["machine"]: row for row in rows if row["run"] == run.name}
        for each in run.result.machines:
            row = mine[each.machine]
            assert each.seconds is not None and each.float32 is not None
            assert (row["seconds"], row["float32"], row["joules"]) == (each.seconds, each.float32, each.joules)
            assert row["of_float32"] == pytest.approx(100 * each.seconds / each.float32)
            assert row["compute"] + row["memory"] + row["rounding"] == pytest.approx(100)
            assert row["label"].endswith("*") == bool(each.wider)
        assert mine["bitfusion"]["seconds"] == pytest.approx(run.result.latency)
        assert mine["bitfusion"]["bfloat16_of_float32"] is None and mine["zc706"]["joules"] is None
    assert len({row["label"].split()[1] for row in rows}) == 1, "one unit for all times"
    assert not any("e+" in row["label"] or "e-" in row["label"] for row in rows)
