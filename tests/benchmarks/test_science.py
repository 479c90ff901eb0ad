"""The tool that trains grids: names become settings, runs are skipped and resumed, and the page says what they gave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.science.__main__ import main
from benchmarks.science.findings import by_input, findings
from benchmarks.science.fixed import fixed_choice, fixed_options, given
from benchmarks.science.frontier import frontier
from benchmarks.science.grid import GRIDS, Run, runs_of
from benchmarks.science.overview import beside_static, overview
from benchmarks.science.page import write_page
from benchmarks.science.protocol import protocol
from benchmarks.science.records import cp_error, groups_of, merge_records, read_records, static_at
from fractrain_fx import FracConfig, RunConfig
from fractrain_fx.config.targets import CostReach, resolve_targets
from fractrain_fx.errors import ConfigError
from fractrain_fx.training import RunSettings, new_run


@pytest.fixture(scope="module")
def runs() -> list[tuple[Run, dict[str, Any]]]:
    """The runs of all grids with their values."""
    return [(run, run.values) for grid in GRIDS.values() for run in grid]


def test_every_run_of_the_grids_is_a_valid_run_with_a_name_of_its_own(runs: list[tuple[Run, dict[str, Any]]]) -> None:
    assert len({run.name for run, _ in runs}) == len({run for run, _ in runs})
    for run, values in runs:
        settings = RunSettings.from_dict(values)
        assert (settings.train.epochs, settings.train.seed) == (run.epochs, run.seed)


READ = {"static": ("precision",), "pfq": ("stages", "schedule"), "slu": ("gate", "schedule")}
READ |= dict.fromkeys(("dfq", "fractrain"), ("options", "weight_bits", "targets", "gate", "schedule"))


def test_a_run_names_all_that_its_method_reads_so_that_other_defaults_would_not_change_it(
    runs: list[tuple[Run, dict[str, Any]]],
) -> None:
    for run, values in runs:
        missing = [name for name in READ.get(values["method"], ()) if name not in values]
        assert not missing, run.name
        assert "gate" not in values or {"init", "control"} <= values["gate"].keys(), run.name


@pytest.mark.parametrize(
    ("method", "setting"),
    [("fractrain", "sign+no-skip+cp-2.9-to-3.8"), ("dfq", "sign+no-skip+cp-3.8"), ("pfq", "stages-from-5")],
)
def test_the_packages_defaults_are_the_settings_of_the_best_measured_runs(method: Any, setting: str) -> None:
    measured = RunSettings.from_dict(Run("resnet20-16px", method, setting).values).frac
    config = FracConfig(method=method, schedule="manual", run=RunConfig(backend="cpu", length=20))
    if measured.targets is not None:
        reach = CostReach((0.0, 10.0), 100, 100, dict.fromkeys(config.precision_stages, 0.0))
        config = config.replace(targets=resolve_targets(config, reach))
    assert config == measured


def test_settings_are_joined_and_those_of_the_gates_merged() -> None:
    values = Run("digits", "fractrain", "linear-init+sign+peak-rate+zero-grid", 4, 3).values
    assert values["gate"] == {"init": "linear", "control": "sign"}
    assert (values["gate_lr"], values["affine"]["gradient_grid"], values["seed"]) == ("peak", "zero", 3)
    assert Run("digits", "fractrain", "default").values["gate"] == {"init": "he", "control": "multiplier"}


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (Run("digit", "fractrain"), "'digit' is unknown.*'digits'"),
        (Run("digits", "fractrain", "linear-init+fischer"), "'fisher'"),
        (Run("digits", "fractrain", "integral"), "runs at commit 88ad369 only"),
        (Run("digits", "static", "cp-3.8"), "changes nothing for method 'static'"),
    ],
)
def test_a_grid_with_a_mistake_says_so_before_anything_runs(run: Run, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assert run.values


def test_a_grid_goes_seed_by_seed() -> None:
    runs = runs_of(["digits"], ["static", "pfq"], epochs=[4, 8], seeds=[0, 1])
    assert len(runs) == 8 and [run.seed for run in runs] == [0] * 4 + [1] * 4


def record(
    method: str, epochs: int, value: float, macs: float, seed: int = 0, setting: str = "default"
) -> dict[str, Any]:
    points = [
        {
            "epoch": epoch,
            "value": value * epoch / epochs,
            "total_macs": macs * epoch / epochs,
            "level": f"cp {2 + (2 * epoch > epochs)} %" if method == "fractrain" else "FW-8/BW-8",
            "cp": 0.021,
            "mutual_information": 0.75 if method == "fractrain" else None,
            "configurations": 40 if method == "fractrain" else None,
        }
        for epoch in range(1, epochs + 1)
    ]
    axes = {"task": "digits", "method": method, "setting": setting, "epochs": epochs, "seed": seed}
    outcome = {"metric": "accuracy", "value": value, "best": value, "total_macs": macs}
    return axes | outcome | {"points": points, "made_with": {"torch": "2"}, "values": {}}


def test_a_run_that_is_collected_again_takes_the_place_of_its_line(tmp_path: Path) -> None:
    path = tmp_path / "science.jsonl"
    merge_records(path, [record("static", 4, 70, 1e9), record("static", 8, 80, 2e9)])
    merge_records(path, [record("static", 4, 71, 1e9)])
    assert [(each["epochs"], each["value"]) for each in read_records(path)] == [(4, 71), (8, 80)]


def test_cp_is_off_its_target_by_the_worst_epoch_after_a_stages_first() -> None:
    # 2.1 % in each of four epochs, two with target 2 and two with target 3: the first of each does not count.
    assert cp_error(record("fractrain", 4, 80, 1e9)) == pytest.approx(0.9 / 3)
    assert cp_error(record("static", 4, 80, 1e9)) is None


def test_static_at_equal_cost_lies_between_the_nearest_lengths() -> None:
    groups = groups_of([record("static", 4, 70, 1e9), record("static", 8, 80, 2e9), record("static", 8, 82, 2e9, 1)])
    assert [len(group.records) for group in groups] == [1, 2]
    assert static_at(1.5e9, groups) == pytest.approx(75.5)
    assert static_at(0.9e9, groups) is None and static_at(2.1e9, groups) is None


def test_the_page_has_means_spread_shares_and_figures(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    results, page = tmp_path / "results" / "science.jsonl", tmp_path / "results.md"
    records = [record("static", 4, 70, 1e9), record("static", 8, 80, 2e9)]
    records += [record("fractrain", 8, value, 1e9, seed, "sign") for seed, value in enumerate((78.0, 79.0, 80.0))]
    merge_records(results, records)
    write_page(page, results, read_records(results))
    runs, text = ((path).read_text(encoding="utf-8") for path in (tmp_path / "results" / "science.md", page))
    (row,) = (line for line in runs.splitlines() if line.startswith("| fractrain | sign |") and "0.75" in line)
    assert "| 8 | 3 | 79.00 (78.00 to 80.00) |" in row and "| 50 % |" in row
    assert "| fractrain | sign | 8 | 1.000e+09 | 79.00 | 70.00 |" in runs  # as dear as four epochs of static
    assert "| -1.00 | 1.000e+09 |" in row
    assert "| static | default | 8 | 1 | 80.00 |  | 100 % |  |" in text
    assert "| fractrain | sign | 8 | 3 | 79.00 | -1.00 | 50 % | +9.00 |" in text
    assert "choosing by input" not in text and "[results](../results.md)" in runs and "(results/science.md)" in text
    for name in ("cost", "epoch"):
        assert f"(results/science-digits-{name}.svg)" in text
        assert (tmp_path / "results" / f"science-digits-{name}.svg").read_text(encoding="utf-8").startswith("<svg")


def test_of_settings_with_the_most_seeds_the_best_and_the_best_below_the_cost_of_static_are_shown() -> None:
    static = [record("static", 4, 70, 1e9), record("static", 8, 80, 2e9), record("static", 16, 84, 4e9)]
    pfq = [record("pfq", 8, value, 1.5e9, 0, setting) for setting, value in (("worse", 78.0), ("better", 79.0))]
    pfq += [record("pfq", 8, 81.0, 3e9, 0, "dear"), record("pfq", 8, 80.5, 3e9, 0, "dear+worse")]
    pfq += [record("pfq", 4, 69.0, 1e9, 0, "better")]
    dfq = [record("dfq", 8, 77.0, 1.5e9, seed, "sure") for seed in range(2)]
    dfq += [record("dfq", 16, 80.0, 3e9, 0, "sure"), record("dfq", 8, 79.0, 1.5e9, 0, "lucky")]
    said = findings(groups_of([*static, *pfq, *dfq]))
    assert "| pfq | better | 8 | 1 | 79.00 | -1.00 | 75 % | +4.00 |" in said
    assert "| pfq | dear | 8 | 1 | 81.00 | +1.00 | 150 % | -1.00 |" in said
    assert "| dfq | sure | 8 | 2 | 77.00 | -3.00 | 75 % | +2.00 |" in said
    assert "| dfq | sure | 16 | 1 | 80.00 | -4.00 | 75 % | -2.00 |" in said
    assert not any(word in said for word in ("worse |", "lucky |", "| 4 |"))


def test_what_choosing_by_input_is_worth_is_said_with_its_sign() -> None:
    tests = [{"value": 78.0, "shuffled_value": 77.5, "fixed_value": 79.0} for _ in range(2)]
    tests[1]["shuffled_value"] = 78.25
    runs = [record("fractrain", 8, 78, 1e9, seed) | {"fixed": test} for seed, test in enumerate(tests)]
    said = by_input(groups_of([record("static", 8, 80, 2e9), *runs]))
    assert said.endswith("| [digits](#digits) | 2 | +0.12 points | -1.00 points |")
    words = [each | {"metric": "perplexity"} for each in runs[:1]]
    assert by_input(groups_of(words)).endswith("| 1 | -0.006 nats | +0.013 nats |")
    assert by_input(groups_of([record("static", 8, 80, 2e9)])) == ""
    assert findings(groups_of(runs)) == ""


def test_the_overview_has_each_method_beside_static_training_where_it_costs_less() -> None:
    runs = [record("static", 4, 70, 1e9), *(record("static", 8, 80, 2e9, seed) for seed in range(2))]
    runs += [record("pfq", 8, 79.0, 1.5e9, 0, "cheap"), record("pfq", 8, 81.0, 3e9, 0, "dear")]
    runs += [record("fractrain", 8, 78.5, 1e9), record("dfq", 4, 69.0, 1e9), record("slu", 8, 79.0, 1e9)]
    said = overview(groups_of(runs))
    assert said.endswith("| [digits](#digits) | 8 | 80.00 % | -1.00 points | 75 % | -1.50 points | 50 % |")
    assert overview(groups_of([each for each in runs if each["method"] in ("static", "slu")])) == ""
    lines = beside_static(groups_of(runs), "digits", 8, "Digits").splitlines()
    assert "- **pfq** (`cheap`) ends 1.00 points lower for 75 % of its cost (one seed)." in lines
    assert "- **fractrain** ends 1.50 points lower for 50 % of its cost (one seed)." in lines
    assert not any("dfq" in line for line in lines) and beside_static(groups_of(runs), "digits", 9, "Digits") == ""
    assert not any("static**" in line for line in lines)  # no other static setting has two seeds
    cheap = [record("static", 8, 79.9, 1e9, seed, name) for seed in range(2) for name in ("few-bits", "more-bits")]
    worse = [record("static", 8, 79.7, 5e8, seed, "fewest-bits") for seed in range(2)]
    lines = beside_static(groups_of([*runs, *cheap, *worse]), "digits", 8, "Digits").splitlines()
    assert lines[2] == "- **static** (`few-bits`) ends 0.10 points lower for 50 % of its cost (2 seeds)."
    assert overview(groups_of([each for each in runs if each["method"] != "static"])) == ""


@pytest.mark.long
def test_the_frontier_compares_with_the_best_static_precision_of_the_same_cost(tmp_path: Path) -> None:
    records = [
        record("static", 20, 80.0, 100.0),
        record("static", 20, 76.0, 39.0, setting="fw-4-bw-6"),
        record("static", 20, 75.0, 37.0, setting="fw-3-bw-8"),
        record("static", 20, 60.0, 28.0, setting="fw-3-bw-6"),
        record("pfq", 20, 77.5, 41.0),
        record("pfq", 20, 76.5, 41.0, seed=1),
        record("static", 20, 76.5, 39.0, setting="samples+fw-4-bw-6"),
        record("static", 20, 76.2, 40.0, setting="outer-8+fw-5-bw-6"),
        record("static", 20, 76.1, 40.0, setting="allocated-outer-40"),
        record("dfq", 20, 79.0, 69.0),
        *[record("dfq", 20, 78.0 + seed, 55.0, setting="cp-3", seed=seed) for seed in range(3)],
        record("dfq", 20, 79.5, 54.0, setting="cp-2"),
        record("fractrain", 12, 99.0, 10.0),
        record("static", 20, 71.0, 29.0, setting="outer-8+needed+fw-5-bw-6"),
        record("pfq", 20, 72.0, 29.0, setting="outer-8+needed+stages-to-6"),
    ]
    words = frontier(groups_of(records), "digits", 20, tmp_path / "frontier.svg")
    assert (tmp_path / "frontier.svg").read_text().startswith("<svg")
    assert words.splitlines()[0] == "| method | 30 % | 40 % | 55 % | 70 % |"
    assert [line.split(" | ") for line in words.splitlines()[2:10] if "by need" not in line] == [
        ["| static", "60.00", "76.00", "76.00", "76.00 |"],
        ["| static, allocated, outer layers too", "", "76.10", "76.10", "76.10 |"],
        ["| static, outer layers too", "", "76.20", "76.20", "76.20 |"],
        ["| static, ranges of samples", "", "76.50", "76.50", "76.50 |"],
        ["| pfq", "", "77.00 (76.50 to 77.50)", "77.00 (76.50 to 77.50)", "77.00 (76.50 to 77.50) |"],
        ["| dfq", "", "", "79.00 (78.00 to 80.00)", "79.00 (78.00 to 80.00) |"],  # and no single run
    ]
    needed = "| pfq, gradients by need, outer layers too | 29 % | 1.00 points better"
    assert f"{needed} | `outer-8+needed+fw-5-bw-6` | 1 |" in words  # it counts as a static precision too
    assert "| pfq | 41 % | 0.80 points better | `outer-8+fw-5-bw-6` | 1 |" in words
    assert "| static, ranges of samples | 39 % | 0.30 points better | `outer-8+fw-5-bw-6` | 1 |" in words
    assert "| static, allocated, outer layers too | 40 % | 0.10 points worse | `outer-8+fw-5-bw-6` | 1 |" in words
    assert "| static, outer layers too | 40 % | 0.20 points better | `fw-4-bw-6` | 1 |" in words
    assert "| dfq | " not in words.partition("beside")[2]  # no static precision costs about as much
    assert "99.00" not in words  # of another length


def test_without_other_static_precisions_there_is_no_frontier(tmp_path: Path) -> None:
    groups = groups_of([record("static", 20, 80.0, 100.0), record("pfq", 20, 79.0, 50.0)])
    assert frontier(groups, "digits", 20, tmp_path / "frontier.svg") == ""


def test_the_papers_training_stands_above_the_rows_of_its_table() -> None:
    runs = [record("static", 20, 80.0, 2000.0), record("fractrain", 160, 83.0, 6400.0, setting="drops+sign")]
    runs += [record("fractrain", 20, 77.0, 1000.0)]
    tables = []
    for static in ([], [record("static", 160, 83.5, 16000.0, setting="drops")]):
        groups = groups_of([each | {"task": "resnet20-16px"} for each in (*runs, *static)])
        tables.append(protocol(groups).splitlines())
    assert "| ResNet-20, 16 pixels | fractrain | drops+sign | 1 | 83.00 |  | 80.67 | 40 % |" in tables[0]
    assert "| ResNet-20, 16 pixels | fractrain | drops+sign | 1 | 83.00 | -0.50 | 80.67 | 40 % |" in tables[1]
    assert "| ResNet-20, 16 pixels | static | drops | 1 | 83.50 |  | 81.15 | 100 % |" in tables[1]
    assert "| ResNet-38, 32 pixels | fractrain | the paper's |  | 92.54 | -0.12 |  | 34 % |" in tables[1]
    assert len(tables[1]) == len(tables[0]) + 1 and protocol(groups_of(runs)) == ""


@pytest.mark.long
def test_a_tiny_grid_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = [f"--runs={tmp_path}/runs", f"--results={tmp_path}/science.jsonl", f"--page={tmp_path}/results.md"]
    grid = ["--task=digits-tiny", "--method", "fractrain", "static", "--epochs=4"]
    assert main(["run", *grid, *places, "--nice=0"]) == 0
    records = {each["method"]: each for each in read_records(tmp_path / "science.jsonl")}
    assert records.keys() == {"fractrain", "static"}
    assert len(records["static"]["points"]) == 4 and records["static"]["points"][0]["mutual_information"] is None
    assert records["fractrain"]["points"][1]["configurations"] >= 1
    assert str(tmp_path) not in (tmp_path / "science.jsonl").read_text()
    assert "| fractrain | default | 4 | 1 |" in (tmp_path / "results.md").read_text()

    capsys.readouterr()
    assert main(["list", *grid, *places]) == 0
    assert capsys.readouterr().out.count("done") == 2
    # A run without its result goes on from its last checkpoint; the other one is not touched.
    run, other = (tmp_path / "runs" / Run("digits-tiny", method, epochs=4).name for method in ("static", "fractrain"))
    before = json.loads((run / "result.json").read_text())
    (run / "result.json").unlink()
    times = (other / "result.json").stat().st_mtime_ns
    assert main(["run", *grid, *places, "--nice=0"]) == 0
    assert json.loads((run / "result.json").read_text()) == before
    assert (other / "result.json").stat().st_mtime_ns == times
    assert (run / "output.txt").read_text().count("epoch   1 ") == 1


@pytest.mark.slow
def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = [f"--runs={tmp_path}/runs", f"--results={tmp_path}/science.jsonl", f"--page={tmp_path}/results.md"]
    bad = Run("digits-tiny", "static", epochs=1)
    (tmp_path / "runs" / bad.name / "checkpoint-0001").mkdir(parents=True)  # empty, so damaged
    (tmp_path / "runs" / bad.name / "config.yaml").write_text("model: zoo:resnet20\n")
    assert main(["run", "--task=digits-tiny", "--method", "static", "float", "--epochs=1", *places, "--nice=0"]) == 1
    assert f"failed: {bad.name}" in capsys.readouterr().err
    assert [each["method"] for each in read_records(tmp_path / "science.jsonl")] == ["float"]


def test_fixed_options_are_the_most_frequent_and_cost_no_less() -> None:
    prices = torch.tensor([[0.0, 1.0, 4.0], [0.0, 2.0, 8.0]])
    frequent = fixed_options(torch.tensor([[0.1, 0.7, 0.2], [0.0, 1.0, 0.0]]), prices)
    # 1 and 2 cost 3, the samples 3.5: of 4 for 0.2 of the samples and 8 for none, the first is worth more.
    assert frequent.tolist() == [2, 1]
    # The most frequent cost 3, the samples 1.8: the second block's alone cost 2.
    assert fixed_options(torch.tensor([[0.4, 0.6, 0.0], [0.4, 0.6, 0.0]]), prices).tolist() == [0, 1]
    assert fixed_options(torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]), prices).tolist() == [2, 2]
    # An option that fewer than a tenth of the samples chose is not given to all of them to save cost.
    assert fixed_options(torch.tensor([[0.05, 0.95, 0.0], [0.4, 0.6, 0.0]]), prices).tolist() == [1, 1]


@pytest.mark.long
def test_a_gated_run_is_tested_with_one_option_a_block(tmp_path: Path) -> None:
    values = {"model": "zoo:resnet20", "data": "digits", "image_size": 8, "subset": 96, "method": "fractrain"}
    trainer = new_run(RunSettings.from_dict(values | {"schedule": "manual", "epochs": 4, "device": "cpu"}), tmp_path)
    trainer.fit()
    found = fixed_choice(trainer)
    assert found is not None and len(found.options) == 9
    assert found.value == pytest.approx(trainer.evaluate().value)
    taken = {name: each.argmax(1).unique() for name, each in trainer.model.cost.choice.items()}
    by_order = dict(zip(taken, found.options, strict=True))
    for block, options in taken.items():
        if len(options) == 1 and found.fixed_cp == pytest.approx(found.cp):
            assert by_order[block] == int(options)
    samples = len(trainer.data.test)
    numbers = torch.arange(9 * samples).view(9, samples) % len(trainer.model.frac_config.options)
    numbers[:, :] = torch.where(numbers == 0, 1, numbers)  # a first option may skip, which not every block can
    with given(trainer.model, numbers):
        trainer.evaluate()
        last = len(next(iter(trainer.model.cost.choice.values())))
        choices = [each.argmax(1) for each in trainer.model.cost.choice.values()]
        assert torch.equal(torch.stack(choices), numbers[:, -last:])
    with given(trainer.model, torch.tensor(found.options).unsqueeze(1).expand(-1, samples)):
        assert trainer.evaluate().value == pytest.approx(found.fixed_value)
        assert float(trainer.model.cost.cp) == pytest.approx(found.fixed_cp, rel=1e-4)
    assert trainer.evaluate().value == pytest.approx(found.value)
    static = new_run(RunSettings.from_dict(values | {"method": "static", "epochs": 1, "device": "cpu"}), tmp_path / "s")
    assert fixed_choice(static) is None
    # A model that ran in compiled code, which calls no hook that comes later.
    trainer._prepared.module = torch.compile(trainer.model, backend="eager")
    trainer.evaluate()
    assert fixed_choice(trainer) == found


def test_one_thing_changed_is_told_beside_the_main_setting_of_the_same_length(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    records = [record("static", 8, 80, 2e9)]
    records += [record("fractrain", 8, 78, 1e9, seed, "fine-options+cp-3.8") for seed in range(2)]
    records += [record("fractrain", 8, 77, 1.1e9, 0, "sign+fine-options+cp-3.8")]
    records += [
        record("fractrain", 8, 76, 1e9, 0, "rising-options+cp-3.8"),
        record("fractrain", 8, 75, 1e9, 0, "cp-3.8"),
        record("dfq", 8, 78, 1e9, 0, "sign"),
        record("dfq", 8, 77, 1e9, 0, "linear-init"),  # another field of the gates, and so two changes
        record("dfq", 8, 76, 1e9, 0, "integral"),
    ]
    records += [record("fractrain", 8, 70, 1e9, 0, "sign+cp-3.8"), record("fractrain", 4, 70, 5e8, 0, "cp-3.8")]
    results = tmp_path / "results" / "science.jsonl"
    merge_records(results, records)
    write_page(tmp_path / "results.md", results, read_records(results))
    text = results.with_suffix(".md").read_text(encoding="utf-8")
    rows = text.partition("### One thing changed")[2].partition("## ")[0].splitlines()
    assert [row.split(" | ")[1:7] for row in rows if row.startswith("| fractrain")] == [
        ["fine-options+cp-3.8, unchanged", "8", "2", "78.00 (78.00 to 78.00)", "", "100 %"],
        ["without fine-options", "8", "1", "75.00", "-3.00", "100 %"],
        ["rising-options for fine-options", "8", "1", "76.00", "-2.00", "100 %"],
        ["with sign", "8", "1", "77.00", "-1.00", "110 %"],
    ]
    assert [row.split(" | ")[1] for row in rows if row.startswith("| dfq")] == ["sign, unchanged", "integral for sign"]
