"""The tab of sensitivities: its rows, the widths that were chosen, and the map in the browser."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from fractrain_fx import allocate
from fractrain_fx.cli import main
from fractrain_fx.config import Recipe
from fractrain_fx.numerics.sensitivity import MeasuredOp, Sensitivities, Sensitivity
from fractrain_fx.report.panels import build_sheet
from fractrain_fx.report.runs import read_runs
from tests.report.browser import opened
from tests.report.made import make_run

OPS = [f"layer{layer}.{block}.conv[{conv}]" for layer, block, conv in product((1, 2, 3), (0, 1), (1, 2))]
WIDTHS = (2, 3, 4, 6, 8)


def sensitivities() -> Sensitivities:
    ops = [MeasuredOp(name, "conv", name, (1000, 1000, 1000)) for name in OPS]
    rows = []
    for number, name in enumerate(OPS, 1):
        for bits in WIDTHS:
            error = number * 4.0**-bits * (-1 if bits == 8 and name == OPS[0] else 1)
            rows += [Sensitivity(name, operand, bits, change=error) for operand in ("x", "w")]
            rows.append(Sensitivity(name, "g", bits, noise=abs(error)))
    return Sensitivities(tuple(ops), tuple(rows), 1.0, 4)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured") / "first"
    make_run(folder, epochs=8)
    sensitivities().to_json(folder / "sensitivity.json")
    return folder


def test_the_map_has_every_width_and_says_which_were_chosen(run: Path) -> None:
    sheet = build_sheet(read_runs([str(run)]))
    rows = sheet.tables["sensitivity-loss-first"]
    assert len(rows) == len(OPS) * 2 * len(WIDTHS) and not any(row["chosen"] for row in rows)
    assert min(row["shade"] for row in rows) >= max(row["shade"] for row in rows) - 6, "also of values below 0"
    allocation = allocate(sensitivities(), "FW-4/BW-6")
    allocation.to_yaml(run / "allocation.yaml")
    tables = build_sheet(read_runs([str(run)])).tables
    for kind, side in (("loss", "fw"), ("noise", "bw")):
        chosen = {row["op"]: row["bits"] for row in tables[f"sensitivity-{kind}-first"] if row["chosen"] == "chosen"}
        assert chosen == {name: getattr(each, side) for name, each in allocation.precisions.items()}


def test_the_map_knows_rules_with_a_format_or_a_recipe_without_a_name(run: Path) -> None:
    found = sensitivities()
    first, second, *rest = found.ops
    own = replace(first, format="mx", rule=Recipe("mx", by_product=True)), replace(second, format="int", rule="jetfire")
    allocation = allocate(replace(found, ops=(*own, *rest)), "FW-8/BW-8", options=["8/8"])
    allocation.to_yaml(run / "allocation.yaml")
    rows = build_sheet(read_runs([str(run)])).tables["sensitivity-loss-first"]
    assert {row["op"] for row in rows if row["chosen"] and row["bits"] == 8} == set(OPS)


def test_the_map_names_the_stages_of_a_width(run: Path) -> None:
    staged = allocate(sensitivities(), "FW(3,4,8)/BW(4,6,8)", stages=3)
    staged.to_yaml(run / "allocation.yaml")
    rows = build_sheet(read_runs([str(run)])).tables["sensitivity-loss-first"]
    for name in OPS:
        widths = [stage.precisions[name].fw for stage in staged.stages]
        words = {row["bits"]: row["chosen"] for row in rows if row["op"] == name and row["operand"] == "weights"}
        for bits in WIDTHS:
            stages = ", ".join(str(number) for number, each in enumerate(widths, 1) if each == bits)
            assert words[bits] == (f"chosen in stage {stages}" if stages else "")


def test_a_run_that_was_not_measured_has_no_tab(tmp_path: Path) -> None:
    make_run(tmp_path / "run", epochs=8)
    assert "sensitivity" not in [panel.key for panel in build_sheet(read_runs([str(tmp_path / "run")])).panels]


@pytest.mark.long
def test_the_map_is_drawn_in_the_browser_and_its_table_has_the_numbers(run: Path, tmp_path: Path) -> None:
    allocate(sensitivities(), "FW-4/BW-6").to_yaml(run / "allocation.yaml")
    out = tmp_path / "report.html"
    assert main(["report", str(run), "--out", str(out)]) == 0
    with opened(out, "sensitivity") as page:
        for kind, operands in (("loss", 2), ("noise", 1)):
            figure = page.locator(f"#figure-sensitivity-{kind}-first .plot svg")
            assert figure.locator(".mark-rect path").count() >= len(OPS) * operands * len(WIDTHS)
            assert figure.locator(".mark-symbol path").count() >= len(OPS) * operands
        page.locator("#figure-sensitivity-loss-first details summary").click()
        page.wait_for_selector("#figure-sensitivity-loss-first details table")
        assert page.locator("#figure-sensitivity-loss-first table tr").count() > len(OPS)
