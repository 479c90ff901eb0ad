"""``fractrain sensitivity``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fractrain_fx import cli
from fractrain_fx.numerics.sensitivity import Sensitivities
from fractrain_fx.training import RunSettings, new_run
from tests.training.runs import quiet, settings
from tests.training.started import another_process


@pytest.mark.long
def test_a_run_is_measured_and_its_widths_are_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = "--model zoo:resnet20 --image-size 8 --subset 160 --batch-size 16 --epochs 1 --device cpu"
    assert cli.main(["train", *small.split(), "--method", "float", "--out", "run"]) == 0
    flags = "--batches 4 --out net.json --draw net.svg --budget FW-4/BW-6 --allocation net.yaml"
    assert cli.main(["sensitivity", "run", *flags.split()]) == 0
    printed = capsys.readouterr().out
    found = Sensitivities.from_json("net.json")
    assert "expected change of the loss" in printed and found.batches == 4
    chosen = RunSettings.from_yaml(Path("net.yaml"))
    assert len(found.measured) == len(chosen.frac.pins) == 20
    assert (chosen.model, chosen.image_size, chosen.train.batch_size) == ("zoo:resnet20", 8, 16)
    assert (chosen.subset, chosen.train.epochs) == (None, RunSettings().train.epochs)
    assert Path("run/sensitivity.json").read_text() == Path("net.json").read_text()
    assert Path("run/allocation.yaml").read_text() == Path("net.yaml").read_text()
    staged = ["--budget", "FW-8/BW-8", "--stages", "3", "--allocation", "staged.yaml"]
    assert cli.main(["sensitivity", "net.json", *staged]) == 0
    config = RunSettings.from_yaml(Path("staged.yaml")).frac
    assert len(config.stages.stages) == 3 and {len(pin.stages) for pin in config.pins} == {3}
    paper = ["--budget", "FW(3,4,6,8)/BW(6,6,8,8)", "--allocation", "staged.yaml"]
    assert cli.main(["sensitivity", "net.json", *paper]) == 0
    assert str(RunSettings.from_yaml(Path("staged.yaml")).frac.stages) == "FW(3,4,6,8)/BW(6,6,8,8)"
    assert Path("net.svg").read_text().startswith("<svg")
    assert cli.main(["sensitivity", "net.json", "--budget", "3"]) == 0
    assert "of 3 % of training at 32 bits" in capsys.readouterr().out
    assert cli.main(["sensitivity", "run", "--batches", "2"]) == 2
    assert "2 batches do not show" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--batches -1", "--batches -1 must be at least 1"),
        ("--out none/net.json", "net.json cannot be written, because its folder does not exist"),
        ("--draw none/net.svg", "net.svg cannot be written"),
        ("--out .", ". is a folder: name a file in it"),
        ("--budget FW-4/BW-6 --allocation none/net.yaml", "net.yaml cannot be written"),
        ("--budget FW-4/BW-6 --write torchtitan none/net.py", "net.py cannot be written"),
    ],
)
def test_what_would_fail_after_the_measuring_is_refused_before_it(
    flags: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sensitivity", "run", *flags.split()]) == 2  # there is no run either
    assert message in capsys.readouterr().err


def test_sensitivities_of_another_version_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "net.json"
    file.write_text('{"file": "fractrain_fx sensitivities", "ops": [{"name": "x"}], "rows": []}')
    assert cli.main(["sensitivity", str(file)]) == 2
    assert "net.json holds sensitivities of another version of this package" in capsys.readouterr().err


def test_a_run_without_a_checkpoint_is_refused_and_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new_run(settings("static", epochs=1), tmp_path, quiet()).fit()
    for folder in tmp_path.glob("checkpoint-*"):
        shutil.rmtree(folder)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert cli.main(["sensitivity", str(tmp_path)]) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_a_run_whose_batch_holds_all_samples_shows_no_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new_run(settings("static", epochs=1, batch_size=96), tmp_path, quiet()).fit()
    assert cli.main(["sensitivity", str(tmp_path), "--batches", "4"]) == 2
    assert "A run whose batch holds all samples" in capsys.readouterr().err


@pytest.mark.long
def test_a_run_is_measured_while_another_process_trains_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new_run(settings("static", epochs=1, batch_size=16), tmp_path, quiet()).fit()
    with another_process(tmp_path):
        assert cli.main(["sensitivity", str(tmp_path), "--batches", "4"]) == 0
    assert "expected change of the loss" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("missing", "holds no run"),
        ("missing --allocation net.yaml", "add --budget"),
        ("net.json --batches 4", "leave it out"),
        ("missing --stages 4", "add --budget"),
        ("missing --write torchao net.py", "add --budget"),
    ],
)
def test_mistakes_are_named(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sensitivity", *flags.split()]) == 2
    assert words in capsys.readouterr().err
