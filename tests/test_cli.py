"""The command as a user meets it: what it prints, what it refuses, and how it stops."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.console import Console

from fractrain_fx.cli import main, parser
from fractrain_fx.config import Method
from fractrain_fx.config.schedule import SCHEDULES
from fractrain_fx.errors import FracTrainError, ModelError
from fractrain_fx.training import RunResult, resume_run
from fractrain_fx.training.data import DATA_SETS
from fractrain_fx.training.settings import Device, LrSchedule, MixedPrecision, Optimizer
from tests.models import thinned

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests" / "training" / "tiny.py"
QUICK = ["--model", f"{TINY}:net", "--image-size", "8", "--subset", "64", "--batch-size", "32", "--device", "cpu"]


def test_training_ends_with_a_table_and_a_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["train", *QUICK, "--method", "static", "--epochs", "1", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "6.25" in printed and "cp_total" in printed and str(out) in printed
    assert (out / "result.json").exists()


def test_a_runs_own_config_repeats_it_and_flags_win(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    quick = [*QUICK, "--method", "dfq", "--targets", "3.5", "--schedule", "manual", "--set", "gate.beta=0.5"]
    assert main(["train", *quick, "--epochs", "2", "--pins", "block.3=FW-8/BW-16", "--out", str(first)]) == 0
    assert main(["train", "--config", str(first / "config.yaml"), "--out", str(second)]) == 0
    (last, again) = (json.loads((run / "result.json").read_text()) for run in (first, second))
    assert last | {"seconds": 0} == again | {"seconds": 0}

    third = tmp_path / "third"
    flags = ["--config", str(first / "config.yaml"), "--epochs", "3", "--set", "gate.dead_band=1", "--out", str(third)]
    assert main(["train", *flags]) == 0
    config = (third / "config.yaml").read_text()
    assert (
        "epochs: 3\n" in config
        and "beta: 0.5" in config
        and "dead_band: 1\n" in config
        and "pattern: block.3" in config
    )


def test_the_papers_settings_override_a_file_and_flags_override_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("{method: fractrain, weight_bits: 8, targets: [1.5, 2.0], data: digits, gate: {beta: 0.5}}")
    assert main(["plan", f"{TINY}:net", "--config", str(file), "--as", "paper", "--targets", "2.7", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["targets"] == [2.7] and found["options"][:2] == ["FW-0/BW-0", "FW-2/BW-6"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "timm:resnet118"], "timm:resnet18"),
        (["--data", "digit"], "'digits'"),
        (["--method", "fractran"], "'fractrain'"),
        (["--format", "mxfp4"], "--format mx --set format_recipe=mxfp4"),
        (["--setting", "adaptation", "--subset", "3"], "larger subset than 3"),
        (["--resume", "nowhere", "--set", "lr=1"], "leave out lr"),
        (["--set", "gate.hiden=3"], "Did you mean 'gate.hidden'"),
        (["--resume", "nowhere", "--as", "paper"], "leave out as"),
        (["--as", "papers"], "--as papers is unknown: write --as paper"),
        (["--targets", "30"], "cannot be reached"),
        (["--pins", "blok.*=8/8"], "blok"),
        (["--pins", "block"], "PATTERN=PRECISION"),
        (["--precision", "8"], "FW-3/BW-6"),
        (["--config", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["--recipe", "table3-resnet38-cifar10-dfg"], "Did you mean 'table3-resnet38-cifar10-dfq'"),
        (["--seed", "99999999999999999999999"], "below 4294967296"),
        (["--epochs", "0"], "train: epochs=0 must be at least 1"),
        (["--resume", "nowhere"], "no run"),
        (["--model", f"{TINY}:diverging", "--method", "static", "--epochs", "2"], "NaN"),
    ],
)
def test_bad_input_gets_one_message_and_exit_code_2(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = [] if "--resume" in flags else [*QUICK, "--epochs", "1", "--out", str(tmp_path)]
    assert main(["train", *quick, *flags]) == 2
    errors = capsys.readouterr().err
    assert message in errors and "Traceback" not in errors


@pytest.mark.parametrize("every", ["0", "-2"])
def test_a_distance_of_watched_steps_below_1_is_refused_before_there_is_a_run(
    every: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["train", *QUICK, "--epochs", "1", "--out", str(out), "--watch", every]) == 2
    assert f"--watch {every} is not a number of batches: write --watch 100" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("flags", [["--method", "fractran"], ["--set", "gate.hiden=3"], ["--targets", "30"]])
def test_debug_raises_what_was_wrong(flags: list[str], tmp_path: Path) -> None:
    with pytest.raises(FracTrainError):
        main(["train", *QUICK, "--epochs", "1", "--out", str(tmp_path), *flags, "--debug"])


def test_a_run_resumes_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(TINY.read_text())
    quick = ["--model", "my.py:net", *QUICK[2:], "--method", "static", "--epochs", "1", "--out", "run"]
    assert main(["train", *quick]) == 0
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert main(["train", "--resume", "../run"]) == 0


def test_an_interrupt_while_modules_are_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(parser, "make_parser", interrupted)
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_resuming_refuses_other_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", "anywhere", "--epochs", "3"]) == 2
    assert "leave out epochs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("train --methd pfq", "train: --methd is unknown. Did you mean '--method'?"),
        ("train --metho=pfq --lr 3", "train: --metho is unknown. Did you mean '--method'?"),
        ("train --gate.hidden 3", "train: --gate.hidden is unknown. Write --set gate.hidden=VALUE."),
        ("train --block-length 3", "train: --block-length is unknown. Write --set block_length=VALUE."),
        ("train --epochs x", "train: --epochs x is not a whole number"),
        ("train --lr nan", "train: --lr nan is not a number"),
        ("train --targets 1 a", "train: --targets a is not a number"),
        ("train stray", "train: 'stray' belongs to no flag"),
        ("plan timm:resnet18 --machin h200", "plan: --machin is unknown. Did you mean '--machine'?"),
        ("plan", "fractrain: MODEL is missing"),
        ("zoo lst", "zoo: 'lst' is unknown: write one of list, show, table. Did you mean 'list'?"),
        ("trian", "fractrain: 'trian' is unknown: write one of train, plan,"),
        ("", "fractrain: no command: write one of train, plan,"),
    ],
)
def test_a_mistake_in_the_command_gets_one_line_and_where_to_look(
    arguments: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments.split())
    assert stop.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert told in first and "--help' lists what it takes" in second


def test_a_warning_has_one_line_without_a_place_inside_the_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = warnings.formatwarning

    def show(*warning: Any) -> None:  # pytest keeps warnings; a terminal gets them so
        sys.stderr.write(warnings.formatwarning(*warning[:4]))

    monkeypatch.setattr(warnings, "showwarning", show)
    warnings.simplefilter("always")
    assert main(["train", *QUICK, "--method", "pfq", "--as", "paper", "--epochs", "1", "--out", str(tmp_path)]) == 0
    (told,) = (line for line in capsys.readouterr().err.splitlines() if "cannot reach" in line)
    assert told.startswith("fractrain train: this run cannot reach its last stage: schedule='auto' begins")
    assert warnings.formatwarning is usual


@pytest.mark.parametrize("width", ["80", pytest.param("112", marks=pytest.mark.long)])
def test_the_final_table_is_whole(
    width: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    assert main(["train", *QUICK, "--method", "static", "--epochs", "1", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    result = RunResult.from_json(tmp_path / "result.json")
    table = printed[printed.index("test accuracy", printed.index("epoch   1")) :].partition("\nrun folder")[0]
    table = table.partition("\n")[2]  # what follows the line of the epoch
    assert "\N{HORIZONTAL ELLIPSIS}" not in table and all(len(line) <= int(width) for line in table.splitlines())
    for value in (f"{result.total_macs:.3e}", f"{result.energy:.3g}", f"{100 * result.mean_cp_total:.2f}", "static"):
        assert value in table
    assert ("  training MACs  " in table) == (width == "80")


@pytest.mark.parametrize(
    "command", thinned(["machines", "zoo table 3", "inspect timm:resnet18 --ops", "zoo table 1"], 2)
)
def test_tables_are_whole_in_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(command.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if not line.startswith("ATTENTION")]
    assert max(map(len, table)) <= 80
    assert not any("\N{HORIZONTAL ELLIPSIS}" in line for line in table)


def test_the_help_fits_on_two_screens_and_every_setting_is_listed_with_an_explanation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    flags = re.findall(r"^  (?:-h, )?(--[a-z-]+)", text, flags=re.MULTILINE)
    assert len(flags) == len(set(flags)) <= 35 and len(text.splitlines()) <= 80
    assert text.index("examples:") < text.index("\n  --config ") < text.index("\n  --method ")
    assert main(["train", "--set", "help"]) == 0
    listed = capsys.readouterr().out
    for name in ("weight_bits", "gate.hidden", "schedule.epsilon", "run.backend", "affine.keep", "mixed_precision"):
        assert re.search(rf"^{name} \(default: .+\)\n    \w", listed, flags=re.MULTILINE), name
    names = re.findall(r"^([a-z_.]+) \(", listed, flags=re.MULTILINE)
    assert len(names) == len(set(names)) > 70


WORDS = {
    "data": DATA_SETS,
    "method": get_args(Method),
    "schedule": SCHEDULES,
    "optimizer": get_args(Optimizer),
    "lr-schedule": get_args(LrSchedule),
    "mixed-precision": get_args(MixedPrecision),
    "device": get_args(Device),
}


def test_a_flags_help_has_every_word_that_it_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    for flag, words in WORDS.items():
        (line,) = re.findall(rf"^  --{flag} \w+\s+(.+) \(default: ", text, flags=re.MULTILINE)
        named = set(re.findall(r"[\w-]+", line))
        assert named >= set(words), (flag, set(words) - named)


def test_plan_and_inspect_agree_on_the_models_own_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for command in ("plan", "inspect"):
        assert main([command, "timm:test_resnet", "--method", "dfq", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["macs"] == found[1]["macs"]
    assert [block["name"] for block in found[0]["blocks"]] == [block["name"] for block in found[1]["blocks"]]
    drawn = tmp_path / "net.dot"
    flags = ["--data", "digits", "--ops", "--shapes", "--draw", str(drawn)]
    assert main(["inspect", f"{TINY}:net", *flags]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("ATTENTION: ") and "stem" in printed and "Nx8x" in printed and " -> " in printed
    assert "Nx8x" in drawn.read_text(encoding="utf-8")
    with pytest.raises(ModelError):
        main(["plan", "timm:resnet10tt", "--debug"])


def test_a_plan_is_for_the_data_that_a_command_names_wherever_it_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def macs(*flags: str) -> int:
        assert main(["plan", "timm:test_resnet", "--json", *flags]) == 0
        return int(json.loads(capsys.readouterr().out)["macs"])

    for name, text in {"data": "data: digits", "method": "method: fractrain"}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    named = [("--data", "digits"), ("--set", "data=digits"), ("--config", str(tmp_path / "data.yaml"))]
    (small,) = {macs(*flags) for flags in named}
    assert macs("--config", str(tmp_path / "method.yaml")) == macs() > 10 * small


def test_the_zoo_lists_its_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", "list"]) == 0
    assert "zoo:resnet38" in capsys.readouterr().out


def _heed_ctrl_c() -> None:
    """Also where the tests themselves run in the background of a shell, whose jobs ignore it and hand that on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupting_leaves_a_run_that_resumes_as_it_was(
    number: signal.Signals, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "fractrain_fx", "train"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    flags = [*QUICK, "--epochs", "400", "--method", "static", "--out", str(out)]
    run = subprocess.Popen(
        [*command, *flags],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        preexec_fn=_heed_ctrl_c,
    )
    metrics = out / "metrics.jsonl"
    for _ in range(600):
        if metrics.exists() and len(metrics.read_text().splitlines()) > 2:
            break
        time.sleep(0.1)
    run.send_signal(number)
    errors = run.communicate(timeout=60)[1]
    assert run.returncode == code
    assert f"--resume {out}" in errors and "Traceback" not in errors
    # The signal may fall between writing a checkpoint and removing the one before it; resuming takes the newest.
    done = max(int(folder.name[-4:]) for folder in out.glob("checkpoint-[0-9]*"))
    resumed = resume_run(out, Console(quiet=True))
    assert done >= 2 and resumed.result().epochs == done

    settings = (out / "config.yaml").read_text()
    (out / "config.yaml").write_text(settings.replace("epochs: 400", "epochs: 3"))
    assert main(["train", "--resume", str(out)]) == 2  # a shorter run would have had other learning rates
    assert "epochs was 400 and is 3" in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.strip() == f"fractrain_fx {metadata.version('fractrain_fx')}"


def test_a_plan_on_a_machine_says_what_a_step_takes(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["plan", f"{TINY}:net", "--image-size", "8", "--method", "static"]
    assert main([*model, "--machine", "h200", "--batch", "16"]) == 0
    printed = capsys.readouterr().out
    assert "a training step of 16 samples on h200" in printed and "FW-8/BW-8" in printed and "bfloat16" in printed
    assert main([*model, "--machine", "bitfusion", "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [step["precision"] for step in steps] == ["float32", "FW-8/BW-8"] and steps[0]["batch"] == 128
    assert main([*model, "--machine", "h20"]) == 2 and main([*model, "--batch", "16"]) == 2
    errors = capsys.readouterr().err
    assert "Did you mean 'h200'" in errors and "add --machine" in errors


def test_a_slow_machines_times_are_in_one_unit_without_exponents(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", "timm:resnet18", "--method", "static", "--machine", "zc706"]) == 0
    printed = capsys.readouterr().out.partition("a training step")[2]
    heading = next(line for line in printed.splitlines() if "of float32" in line)
    rows = [line for line in printed.splitlines() if line.startswith((" float32", " FW-"))]
    assert heading.split()[:2] == ["precision", "s"] and len(rows) == 2
    assert all("e+" not in row and len(row) <= 80 for row in rows) and "slowest at float32: " in printed


def test_machines_lists_figures_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machines"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "989.5" in printed and "NVIDIA H200 Tensor Core GPU Datasheet" in printed and "zc706" in printed
    assert main(["machines", "--json"]) == 0
    assert {row["name"]: row for row in json.loads(capsys.readouterr().out)}["l4"]["bandwidth"] == 300e9
