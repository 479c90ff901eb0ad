"""The lines and event files of a run, as a person reads them."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fractrain_fx.model.saved.folder import Weights
from fractrain_fx.training import TrainSettings, new_run, resume_run
from fractrain_fx.training.folder.checkpoint import Checkpoint, save_checkpoint
from fractrain_fx.training.length import RunLength, StepPlace
from fractrain_fx.training.log import RunLog
from fractrain_fx.training.log.messages import StepReport
from fractrain_fx.training.log.run_log import Pace
from tests.training.runs import settings

LENGTH = RunLength(TrainSettings(epochs=1), 100)

LINE = re.compile(
    r"epoch 1/2  step 2/3  stage 1/2  loss \d\.\d{4}  cp \d+\.\d\d %  \d+\.\d samples/s  lr 0\.05  left \d:\d\d:\d\d"
)


class Clock:
    """Time that passes only when told, or by some seconds at each look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0) -> None:
        self.now, self._seconds = 100.0, seconds
        monkeypatch.setattr("time.monotonic", self._look)

    def _look(self) -> float:
        self.now += self._seconds
        return self.now


def report(step: int) -> StepReport:
    return StepReport(StepPlace(1, 2, step, 50, step), 1, 4, 0.5, 0.0154, 0.02, 0.1, {"layer1": 3.5})


def test_without_a_terminal_a_line_comes_every_30_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, text = Clock(monkeypatch), io.StringIO()
    with RunLog(None, LENGTH, console=Console(file=text, width=200)) as log:
        log.begin_epoch()
        for step in range(1, 41):
            clock.now += 2
            log.step(8)
            if step % 10 == 1 or log.due:
                log.report(report(step))
    assert text.getvalue().splitlines() == [
        "epoch 1/2  step 15/50  stage 1/4  loss 0.5000  cp 1.54 %  4.0 samples/s  lr 0.1  left 0:02:50",
        "epoch 1/2  step 30/50  stage 1/4  loss 0.5000  cp 1.54 %  4.0 samples/s  lr 0.1  left 0:02:20",
    ]


def test_a_terminal_has_a_bar_and_no_such_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, text = Clock(monkeypatch), io.StringIO()
    with RunLog(None, LENGTH, console=Console(file=text, width=200, force_terminal=True)) as log:
        clock.now += 60
        assert not log.due
        log.step(8)
        log.report(report(1))
    assert "epoch 1/2 stage 1/4 loss 0.500 cp 1.54 %" in text.getvalue() and "samples/s" not in text.getvalue()


def test_speed_leaves_out_evaluations_and_the_time_left_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = Pace(4)
    for _ in range(2):
        clock.now += 10  # an evaluation
        pace.begin()
        clock.now += 2
        pace.step(6)
    assert pace.speed() == 3 and pace.left() == 24 and pace.speed() == 0


def test_a_run_explains_its_words_and_logs_steps_and_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, 31)
    text = io.StringIO()
    new_run(settings(), tmp_path, Console(file=text, width=112)).fit()
    first, loud, second, how, *lines = text.getvalue().splitlines()
    assert first.startswith("cp (cost percentage) 1.50 % means") and "FW-4/BW-6 means 4 bits in the" in first
    assert "cp_total" in first and "A stage is" in first
    assert re.match(r"ATTENTION: ops that stay float take \d+ % of the cost .*first contraction.*; gates cost", loud)
    assert "2 stages: target cp " in second and " % / " in second
    assert how.startswith("rounds by ") and "(run.backend='auto': FRACTRAIN_BACKEND is " in how
    assert LINE.fullmatch(lines[1]) and "stage 1 (cp " in lines[3] and re.search(r"accuracy \d+\.\d\d %$", lines[3])

    steps = events(tmp_path / "tensorboard" / "steps")
    assert [scalar.step for scalar in steps.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert {"cp_percent", "cp_total_percent", "lr", "samples_per_second", "bits/model"} <= set(steps.Tags()["scalars"])
    epochs = events(tmp_path / "tensorboard")
    assert [scalar.value for scalar in epochs.Scalars("stage")] == [1, 2]
    assert 0 <= epochs.Scalars("bits/model")[-1].value <= 8
    assert 1 < epochs.Scalars("cp_percent")[-1].value < 10


def test_a_resumed_run_counts_its_steps_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, 31)
    run = new_run(settings("pfq"), tmp_path, Console(quiet=True))

    def killed(out: Path, weights: Weights, checkpoint: Checkpoint) -> None:
        if checkpoint.epoch < 2:
            save_checkpoint(out, weights, checkpoint)

    with monkeypatch.context() as patch:  # as if it were killed before its last checkpoint
        patch.setattr("fractrain_fx.training.trainer.save_checkpoint", killed)
        run.fit()
    resume_run(tmp_path, Console(quiet=True)).fit()
    steps = events(tmp_path / "tensorboard" / "steps")
    assert [scalar.step for scalar in steps.Scalars("bits/scheduled")] == [1, 2, 3, 4, 5, 6]


def events(folder: Path) -> EventAccumulator:
    """The event files of one run of TensorBoard, without those of folders in it."""
    found = EventAccumulator(str(folder))
    found.Reload()
    return found
