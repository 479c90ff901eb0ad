"""The tab of watched steps: its size, its rows, and a click in the browser."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fractrain_fx.cli import main
from fractrain_fx.numerics import OperandRecord, WatchedStep, watch
from fractrain_fx.numerics.records import FILE, append_step
from fractrain_fx.report.panels import build_sheet
from fractrain_fx.report.runs import read_runs
from fractrain_fx.zoo.models import resnet38
from tests.build import rewritten
from tests.report.browser import opened
from tests.report.conftest import QUICK
from tests.report.made import make_run

STEPS = 125


@pytest.fixture(scope="module")
def watched_step() -> WatchedStep:
    torch.manual_seed(0)
    images = torch.randn(4, 3, 16, 16)
    model = rewritten(resnet38(), images, method="static", precision="FW-8/BW-8")
    with watch(model) as watched:
        model(images).square().mean().backward()
    (step,) = watched.records
    return step


def _at(step: WatchedStep, number: int, steps: int) -> WatchedStep:
    """The step later in the run: ratios and ranges drift, and one op falls in the second half."""

    def drifted(record: OperandRecord) -> OperandRecord:
        seen = record.statistics
        fall = 30.0 if record.op == "layer2.3.conv1" and number > 100 * steps / 2 else 0.0
        sqnr = None if seen.sqnr is None else seen.sqnr + math.sin(number / 3000) - fall
        return replace(record, statistics=replace(seen, sqnr=sqnr, hi=(seen.hi or 0.0) * (1 + number / 1e5)))

    return replace(step, step=number, operands=tuple(map(drifted, step.operands)))


def _watched_run(folder: Path, step: WatchedStep, epochs: int, steps: int) -> None:
    """A run of which every 100th step was watched."""
    make_run(folder, epochs)
    for index in range(steps):
        append_step(folder / FILE, _at(step, 1 + 100 * index, steps))


@pytest.fixture(scope="module")
def run(watched_step: WatchedStep, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watched") / "resnet38"
    _watched_run(folder, watched_step, 8, STEPS)
    return folder


@pytest.mark.long
def test_the_page_of_a_long_watched_run_stays_small(watched_step: WatchedStep, tmp_path: Path) -> None:
    _watched_run(tmp_path / "resnet38", watched_step, 160, 625)  # 391 steps an epoch
    assert main(["report", str(tmp_path / "resnet38"), "--out", str(tmp_path / "report.html")]) == 0
    assert (tmp_path / "report.html").stat().st_size < 2e6


def test_the_map_has_the_worst_operand_of_each_op_in_each_stretch(run: Path, watched_step: WatchedStep) -> None:
    sheet = build_sheet(read_runs([str(run)]))
    rows = sheet.tables["numerics-resnet38"]
    ops = {each.op for each in watched_step.operands if each.statistics.sqnr is not None}
    ends = sorted({row["end"] for row in rows})
    assert len(rows) == len(ops) * len(ends) and len(ends) <= 60 and ends[-1] == 1 + 100 * (STEPS - 1)
    fallen = [row["sqnr"] for row in rows if row["op"] == "layer2.3.conv1"]
    assert fallen[0] - fallen[-1] > 28
    curves = [row for row in sheet.tables["curves-resnet38"] if row["op"] == "layer2.3.conv1"]
    assert {row["operand"] for row in curves} == {"x of FW and GC", "w of FW and EB", "g of EB and GC", "y of FW"}


def test_a_run_trained_with_watch_has_the_tab_and_one_without_has_not(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert main(["train", *QUICK, "--method", "static", "--epochs", "1", "--watch", "1", "--out", str(out)]) == 0
    assert "numerics" in [panel.key for panel in build_sheet(read_runs([str(out)])).panels]
    assert "numerics" not in [panel.key for panel in build_sheet(read_runs([str(trained / "static")])).panels]


@pytest.mark.long
def test_a_click_on_the_map_draws_the_curves_of_that_op(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert main(["report", str(run), "--out", str(out)]) == 0
    with opened(out, "numerics") as page:
        first = page.text_content("#title-curves-resnet38-ratios")
        page.locator("#figure-numerics-resnet38 .plot").locator("svg, canvas").click()
        for _ in range(100):
            now = page.text_content("#title-curves-resnet38-ratios")
            if now != first:
                break
            page.wait_for_timeout(100)
        assert now != first
        chosen = page.eval_on_selector("#numerics-op", "select => select.value")
        assert chosen in now and now.startswith("resnet38, ")
        assert page.locator("#figure-curves-resnet38-ratios .plot svg path").count() > 5
        page.select_option("#numerics-op", "layer2.3.conv1")
        page.wait_for_timeout(1000)
        assert "layer2.3.conv1" in page.text_content("#title-curves-resnet38-ranges")
