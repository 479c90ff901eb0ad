"""``python -m benchmarks.gpu``: without a GPU, out of time, with an error in an item, and every part in small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import parts, steps
from benchmarks.gpu.__main__ import failures, main
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.results import Found, Results, markdown, slug, write_page
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.standby import standing_by
from benchmarks.records import Quartiles
from benchmarks.step.__main__ import main as measure_steps
from benchmarks.step.methods import Step
from benchmarks.step.subjects import SUBJECTS, Subject
from fractrain_fx.errors import ModelError
from tests.residual import Residual

ROOT = Path(__file__).parents[2]


def result_in(folder: Path) -> Path:
    (file,) = (folder / "results").glob("gpu-*.json")
    return file


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--out", str(tmp_path)])
    assert "No NVIDIA GPU" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_trying_the_code_on_a_cpu_never_writes_results_of_the_project(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--device", "cpu", "--small"], ["--device", "cpu", "--out", "elsewhere"]):
        with pytest.raises(SystemExit, match="2"):
            main(argv)
    assert "--small --device cpu --out FOLDER" in capsys.readouterr().err


@pytest.mark.long
def test_a_part_out_of_time_is_recorded_as_not_run_and_other_parts_are_kept(tmp_path: Path) -> None:
    argv = ["--small", "--device", "cpu", "--out", str(tmp_path), "--minutes", "0.1", "--parts", "training"]
    main(argv)
    file = result_in(tmp_path)
    held = Results.load(file)
    assert held.parts["training"].rows == {} and "was over" in held.parts["training"].not_run["all"]
    held.parts["memory"] = Found(rows={"a": [{"model": "a", "saved, MB": 1.5}]})
    held.save()
    main(argv)
    assert Results.load(file).parts["memory"] == held.parts["memory"]
    page = (tmp_path / "measured" / "gpu.md").read_text()
    assert "| a | 1.5 |" in page and "Not run (the time of this part was over): all." in page


def test_an_item_that_fails_is_named_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(fails: bool) -> Iterator[dict[str, Any]]:
        yield {"model": "small", "ms": Quartiles(2.0, 1.0, 3.0), "note": ""}
        if fails:
            raise RuntimeError("out of\nmemory")

    made = Part("Memory", "How.", 1, lambda setting: {"bad": lambda: rows(True), "good": lambda: rows(False)})
    monkeypatch.setitem(parts.PARTS, "memory", made)
    argv = ["--small", "--device", "cpu", "--out", str(tmp_path)]
    main([*argv, "--parts", "memory", "--minutes", "0.08"])  # makes the file; no time for the part
    main([*argv, "--run", "memory"])
    found = Results.load(result_in(tmp_path)).parts["memory"]
    assert found.rows.keys() == {"bad", "good"}
    assert found.not_run == {"bad": "RuntimeError: out of memory"}
    text = markdown(Results.load(result_in(tmp_path)))
    assert text.count("| small | 2.00 (1.00-3.00) |") == 2 and "Not run (RuntimeError: out of memory): bad." in text
    assert "note" not in text  # a column without values is left out


def test_after_an_error_that_loses_the_gpu_another_process_runs_the_other_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(name: str) -> Iterator[dict[str, Any]]:
        yield {"model": name}
        if name == "bad":
            raise torch.AcceleratorError("device-side assert triggered")

    items = {name: partial(rows, name) for name in ("good", "bad", "later")}
    monkeypatch.setitem(parts.PARTS, "memory", Part("Memory", "How.", 1, lambda setting: items))
    argv = ["--small", "--device", "cpu", "--out", str(tmp_path), "--parts", "memory"]
    ended = []

    def run(call: list[str], until: float) -> str:
        try:
            main([*argv, "--run", "memory"])
            ended.append(0)
        except SystemExit as end:
            assert isinstance(end.code, int)
            ended.append(end.code)
        return f"its process ended with code {ended[-1]}"

    monkeypatch.setattr(gpu, "begin_process", list)
    monkeypatch.setattr(gpu, "wait_for_end", run)
    main(argv)
    found = Results.load(result_in(tmp_path)).parts["memory"]
    assert ended == [75, 0] and list(found.rows) == ["good", "bad", "later"]
    assert found.not_run == {"bad": "AcceleratorError: device-side assert triggered"}


def test_chosen_items_are_run_beside_the_results_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def rows(name: str) -> Iterator[dict[str, Any]]:
        ran.append(name)
        yield {"model": f"{name} {len(ran)}"}

    items = {name: partial(rows, name) for name in ("one", "two", "three")}
    monkeypatch.setitem(parts.PARTS, "memory", Part("Memory", "How.", 1, lambda setting: items))

    def run(call: list[str], until: float) -> str:
        main(call[call.index("--small") :])
        return "its process ended with code 0"

    monkeypatch.setattr(gpu, "begin_process", list)
    monkeypatch.setattr(gpu, "wait_for_end", run)
    argv = ["--small", "--device", "cpu", "--out", str(tmp_path), "--parts", "memory"]
    main(argv)
    whole = Results.load(result_in(tmp_path)).command
    main([*argv, "--items", "three", "one"])
    held = Results.load(result_in(tmp_path))
    assert ran == ["one", "two", "three", "three", "one"] and held.command == whole
    assert {name: row["model"] for name, (row,) in held.parts["memory"].rows.items()} == {
        "two": "two 2",
        "three": "three 4",
        "one": "one 5",
    }
    with pytest.raises(SystemExit, match="2"):
        main([*argv, "--items", "four"])
    assert "no item is called 'four': 'one', 'three', 'two'" in capsys.readouterr().err


@pytest.mark.long
def test_processes_prepare_at_a_time_and_measure_in_turn(tmp_path: Path) -> None:
    program = """
import pathlib, sys
from benchmarks.gpu.standby import wait_to_be_told
print("a line of its own", flush=True)
if sys.argv[1] == "ends":
    raise SystemExit(3)
if sys.argv[1] == "hangs":
    import time; time.sleep(600)
wait_to_be_told()
pathlib.Path(sys.argv[2]).write_text("measured")
"""
    files = {name: tmp_path / name for name in ("quick", "ends", "hangs")}
    calls = {name: [sys.executable, "-c", program, name, str(file)] for name, file in files.items()}
    with standing_by(calls, lambda: True) as standby:
        assert standby.ready(8) == ["quick"]
        assert not any(file.exists() for file in files.values())
        assert standby.measure("quick", lambda child: str(child.wait())) == "0"
    assert files["quick"].read_text() == "measured" and not files["hangs"].exists()
    with standing_by(calls, lambda: False) as standby:
        assert standby.ready(5) == []


def test_a_compiled_item_that_fails_is_named_when_its_turn_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(setting: Setting, fails: bool) -> Iterator[dict[str, Any]]:
        if fails:
            raise RuntimeError("does not compile")
        setting.prepared()
        yield {"model": "small"}

    made = Part("Steps", "How.", 1, lambda setting: {n: partial(rows, setting, n == "bad") for n in ("bad", "good")})
    monkeypatch.setitem(parts.PARTS, "steps", made)
    told: list[str] = []
    monkeypatch.setattr(gpu, "wait_to_be_told", lambda: told.append("turn"))
    file = tmp_path / "results" / "gpu-x.json"
    Results(file, {"processor": "x"}, "command", {"steps": Found(not_run={"all": ""})}).save()
    for name in ("bad", "good"):
        gpu._run_told("steps", Setting("cpu", small=True, rounds=1), [name], file)
    found = Results.load(file).parts["steps"]
    assert told == ["turn"] * 2 and found.rows == {"good": [{"model": "small"}]}
    assert found.not_run == {"all": "", "bad": "RuntimeError: does not compile"}


def test_a_method_that_fails_has_a_note_and_the_others_have_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Subject("small", Residual, {"cpu": 4}, lambda n: (torch.randn(n, 6), torch.randn(n, 3)), F.mse_loss)
    monkeypatch.setitem(SUBJECTS, "resnet38", tiny)
    methods = ("float", "static+torchao-float8", "pfq+checkpointed")  # 6 channels are no multiple of 16
    setting = Setting("cpu", small=True, rounds=2)
    plain, refused, checkpointed = steps.measured("resnet38", methods, setting)
    assert refused["step, ms"] is None and "ModelError" in refused["note"]
    assert checkpointed["ratio"].median > 0 and not checkpointed["note"]
    assert plain["saved, ratio"] == 1.0 > checkpointed["saved, ratio"]
    with pytest.raises(ModelError):  # python -m benchmarks.step tells of it at once
        measure_steps(["--models", "resnet38", "--methods", "static+torchao-float8", "--rounds", "1"])

    def fails(step: Step) -> int:
        raise RuntimeError("no profiler")

    monkeypatch.setattr("benchmarks.step.__main__.saved_bytes", fails)
    (row,) = steps.measured("resnet38", ("float",), setting)
    assert row["step, ms"].median > 0 and row["note"] == "RuntimeError: no profiler"


def test_checks_that_do_not_hold_are_listed(tmp_path: Path) -> None:
    rows = [
        {"check": "one", "holds": "yes", "detail": ""},
        {"check": "two", "holds": "no", "detail": "0.3 is above 0.1"},
    ]
    results = Results(tmp_path / "gpu-x.json", {"processor": "x"}, "command", {"numerics": Found(rows={"all": rows})})
    assert failures(results) == ["two (0.3 is above 0.1)"]


def test_the_project_s_page_has_the_tables_of_all_results(tmp_path: Path) -> None:
    assert slug("NVIDIA GeForce RTX 4090") == "nvidia-geforce-rtx-4090"
    page = tmp_path / "gpu.md"
    page.write_text((ROOT / "docs" / "measured" / "gpu.md").read_text())
    write_page(page, ROOT / "docs" / "results")
    assert page.read_text() == (ROOT / "docs" / "measured" / "gpu.md").read_text()


def test_items_of_the_full_benchmark_have_names_in_order_of_worth() -> None:
    setting = Setting("cpu", small=False, rounds=10)
    models = ("transformer-base", "resnet38", "gpt2", "resnet50", "vit_small")
    names = list(PARTS["steps"].items(setting))
    assert names[:6] == [*(f"{model}, eager" for model in models), "transformer-base, pfq+graphs"]
    for model in models:
        assert {f"{model}, eager", f"{model}, dfq+graphs", f"{model}, dfq+compiled"} <= set(names)
    compiled = steps.compiled_items(setting)
    assert set(compiled) == {name for name in names if "graphs" in name or "compiled" in name}
    widths = {name.removesuffix(", torchao").split()[1] for name in PARTS["linears"].items(setting)}
    assert widths == {"512", "1024", "2048", "4096", "8192"}


def test_listing_the_items_of_a_part_changes_no_setting_of_torch() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.allow_tf32, dict(os.environ)
    for part in PARTS.values():
        part.items(Setting("cpu", small=True, rounds=1))
    assert before == (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.allow_tf32, dict(os.environ))


@pytest.mark.slow
def test_every_part_runs_in_small_on_a_cpu(tmp_path: Path) -> None:
    argv = ["--small", "--device", "cpu", "--out", str(tmp_path), "--minutes", "40"]
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu", *argv], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    held = json.loads(result_in(tmp_path).read_text())
    assert list(held["parts"]) == list(PARTS)
    for name, found in held["parts"].items():
        assert found["not_run"] == {}, name
        rows = [row for item in found["rows"].values() for row in item]
        assert rows and not any(row.get("note") for row in rows), rows
    page = (tmp_path / "measured" / "gpu.md").read_text()
    assert all(f"### {part.title}" in page for part in PARTS.values())
