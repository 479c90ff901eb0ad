"""What is read of a run's folder, and what is said about folders that are no runs, or damaged ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fractrain_fx.cli import main
from fractrain_fx.errors import RunError
from fractrain_fx.report.frames import epoch_rows, stage_rows
from fractrain_fx.report.runs import read_run, read_runs


def report(*arguments: object) -> int:
    return main(["report", *map(str, arguments)])


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of a run that a test may damage."""
    return shutil.copytree(trained / "fractrain", tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint-*"))


def lines(run: Path) -> list[str]:
    return (run / "metrics.jsonl").read_text().splitlines(keepends=True)


def test_a_run_is_read_as_it_was_written(trained: Path) -> None:
    run = read_run(trained / "fractrain")
    written = [json.loads(line) for line in lines(trained / "fractrain")]
    assert [record.to_dict() for record in run.records] == [
        row | {"options": {block: tuple(shares) for block, shares in row["options"].items()}, "parts": ()}
        for row in written
    ]
    assert run.result is not None and run.turning_points == run.result.turning_points == (1, 2, 3)
    assert run.mean("cp") == pytest.approx(run.result.mean_cp)
    assert run.best is not None and run.best.row.epoch == run.result.best_epoch
    assert [stage.name for stage in run.stages] == list(run.result.hardware["end"]["by_stage"])
    assert [stage.target for stage in run.stages] == [float(stage.name.split()[2]) for stage in run.stages]
    assert run.options[0] == "FW-0/BW-0" and len(run.options) == 7
    (start,) = run.starts
    assert start.command.startswith("fractrain train --model") and start.epoch == 0 and start.device == "cpu"
    assert start.versions.keys() == {"python", "torch", "fractrain_fx"}


def test_a_run_that_goes_on_keeps_the_command_that_continued_it(run: Path, trained: Path) -> None:
    shutil.copytree(trained / "fractrain" / "checkpoint-0004", run / "checkpoint-0004")
    assert main(["train", "--resume", str(run)]) == 0
    commands = [start.command for start in read_run(run).starts]
    assert len(commands) == 2 and commands[1] == f"fractrain train --resume {run}"
    assert [start.epoch for start in read_run(run).starts] == [0, 4]


def test_a_run_that_is_not_through_says_how_to_go_on(run: Path) -> None:
    (run / "result.json").unlink()
    (note,) = read_run(run).notes
    assert f"fractrain train --resume {run}" in note


def test_metrics_alone_are_enough_for_the_trajectory(run: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone.jsonl"
    shutil.copy(run / "metrics.jsonl", alone)
    read = read_run(alone)
    assert (read.name, read.settings, read.result) == ("alone", None, None) and read.options[0] == "option 1"


def test_an_epoch_whose_line_is_cut_off_is_left_out_and_said(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "result.json").unlink()
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-40])
    assert report(run, "--out", tmp_path / "page.html") == 0
    told = capsys.readouterr().err
    assert "epoch 4 is left out" in told and f"fractrain train --resume {run}" in told
    assert "epoch 4 is left out" in (tmp_path / "page.html").read_text()
    assert len(read_run(run).records) == 3


def test_a_run_whose_first_lines_were_lost_is_reported_from_the_next_epoch_on(run: Path, tmp_path: Path) -> None:
    whole = read_run(run)
    (run / "metrics.jsonl").write_text("".join(lines(run)[2:]))  # as of a run that went on without its metrics
    assert report(run, "--out", tmp_path / "page.html") == 0
    rest = read_run(run)
    assert [record.row.epoch for record in rest.records] == [3, 4]
    (note,) = rest.notes
    assert "metrics.jsonl has no lines of the first 2 epochs, which were lost" in note
    assert note in (tmp_path / "page.html").read_text()
    assert rest.mean("cp") == pytest.approx(whole.mean("cp"))  # the result's
    ours, theirs = epoch_rows([rest]), epoch_rows([whole])[2:]
    assert [row["macs"] for row in ours] == [row["macs"] for row in theirs]
    assert [row["joules"] for row in ours] == [None, None]  # summed over epochs, of which some are lost
    seconds = [row["epoch_seconds"] for row in stage_rows([rest])]
    assert seconds == pytest.approx([rest.records[0].train_seconds, stage_rows([whole])[3]["epoch_seconds"]])


def damage(run: Path, what: str) -> Path:
    """Spoil a run; give what to report on."""
    metrics, text = run / "metrics.jsonl", (run / "metrics.jsonl").read_text()
    match what:
        case "missing":
            return run / "nowhere"
        case "empty folder":
            (run / "empty").mkdir()
            return run / "empty"
        case "no epoch yet":
            metrics.unlink()
            (run / "result.json").unlink()
        case "nothing in metrics":
            metrics.write_text("")
        case "folder of runs":
            return run.parent
        case "broken line":
            metrics.write_text(text.replace('"epoch": 2', '"epoch" 2'))
        case "other line":
            metrics.write_text("".join(['{"event": 1}\n', *lines(run)]))
        case "lost line":
            metrics.write_text("".join(lines(run)[:1] + lines(run)[2:]))
        case "no metrics":
            metrics.unlink()
        case "binary":
            metrics.write_bytes(b"\xff\xfe\x00")
        case "broken settings":
            (run / "config.yaml").write_text("method: [fractrain\n")
        case "other settings":
            config = (run / "config.yaml").read_text()
            (run / "config.yaml").write_text(config.replace("- FW-6/BW-12\n", ""))
        case "broken result":
            (run / "result.json").write_text("{")
        case "other result":
            metrics.write_text("".join(lines(run)[:-1]))
        case "broken starts":
            (run / "starts.jsonl").write_text("{}\n")
    return run


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("missing", "does not exist: give the folder that fractrain train wrote to"),
        ("empty folder", "holds no run"),
        ("no epoch yet", "fractrain train --resume"),
        ("nothing in metrics", "wait for the run's first one"),
        ("folder of runs", "holds some: fractrain report"),
        ("broken line", "line 2 of"),
        ("other line", "restore the file from a copy"),
        ("lost line", "line 2 of"),
        ("no metrics", "restore that file from a copy"),
        ("binary", "restore it from a copy"),
        ("broken settings", "config.yaml could not be read as YAML"),
        ("other settings", "belong to different runs"),
        ("broken result", "writes it again"),
        ("other result", "lines were lost"),
        ("broken starts", "starts.jsonl"),
    ],
)
def test_what_is_no_run_or_damaged_is_refused_with_a_way_out(
    what: str, message: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(damage(run, what), "--out", tmp_path / "page.html") == 2
    told = capsys.readouterr().err
    assert message in told and "Traceback" not in told
    assert not (tmp_path / "page.html").exists()


def test_two_runs_of_one_name_must_be_named(run: Path, trained: Path) -> None:
    other = shutil.copytree(trained / "pfq", run.parent / "else" / "run")
    with pytest.raises(RunError, match=f"first={run} second={other}"):
        read_runs([str(run), str(other)])
    assert [each.name for each in read_runs([f"first={run}", f"second={other}"])] == ["first", "second"]
    with pytest.raises(RunError, match="given twice: leave one out"):
        read_runs([f"first={run}", f"second={run}"])


def test_a_path_with_an_equals_sign_is_a_path(run: Path) -> None:
    odd = run.rename(run.parent / "lr=0.1")
    (read,) = read_runs([str(odd)])
    assert read.name == "lr=0.1"
