"""A run that is watched, and a run whose loss jumps or is not finite: what is written and said."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fractrain_fx.errors import NonFiniteLossError
from fractrain_fx.model.saved.folder import Weights
from fractrain_fx.numerics import read_steps
from fractrain_fx.numerics.records import FILE
from fractrain_fx.training import build_trainer, new_run, resume_run
from fractrain_fx.training.folder.checkpoint import Checkpoint, save_checkpoint
from tests.training.runs import quiet, settings


def steps(out: Path) -> list[int]:
    return [step.step for step in read_steps(out / FILE)]


def test_a_watched_run_has_a_line_for_each_watched_batch_and_the_same_weights(tmp_path: Path) -> None:
    found = []
    for every in (None, 2):
        trainer = new_run(settings("static", epochs=2), tmp_path / str(every), quiet())
        trainer.watched_every = every
        trainer.fit()
        found.append(trainer.model.state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert steps(tmp_path / "2") == [1, 3, 5]  # 3 batches an epoch
    assert not (tmp_path / "None" / FILE).exists()


def test_a_resumed_run_drops_the_lines_that_it_trains_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = new_run(settings("static", epochs=2), tmp_path / "run", quiet())
    trainer.watched_every = 1

    def stopped(out: Path, weights: Weights, checkpoint: Checkpoint) -> None:
        if checkpoint.epoch == 2:
            raise KeyboardInterrupt
        save_checkpoint(out, weights, checkpoint)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("fractrain_fx.training.trainer.save_checkpoint", stopped)
        trainer.fit()
    assert steps(tmp_path / "run") == [1, 2, 3, 4, 5, 6]
    again = resume_run(tmp_path / "run", quiet())
    again.watched_every = 2
    again.fit()
    assert steps(tmp_path / "run") == [1, 2, 3, 5]


def test_a_loss_that_is_not_finite_names_the_op_by_running_the_batch_again() -> None:
    trainer = build_trainer(settings("static", function="net"), console=quiet())
    with torch.no_grad():
        trainer.model.get_parameter("block.1.weight")[0] = torch.inf
    with pytest.raises(NonFiniteLossError, match=r"In this step, run again, the input x of block\.3 in FW was first"):
        trainer.fit()


def test_a_loss_that_jumps_is_told_once_with_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build_trainer(settings("static", function="net"), console=quiet())
    alarm, (inputs, targets) = trainer._alarm, next(iter(trainer._prepared.loader.train(0, 1)))
    told = [alarm.jumped(2.0 + 0.01 * (step % 3), inputs, targets) for step in range(20)]
    assert told == [None] * 20
    line = alarm.jumped(9.0, inputs, targets)
    assert line is not None
    assert line.startswith(
        "  the loss jumped from about 2.01 to 9: in this step, run again, all values were finite, and "
    )
    assert alarm.jumped(9.0, inputs, targets) is None


def test_a_loss_of_almost_nothing_jumps_without_harm() -> None:
    trainer = build_trainer(settings("static", function="net"), console=quiet())
    alarm, (inputs, targets) = trainer._alarm, next(iter(trainer._prepared.loader.train(0, 1)))
    losses = [2.0] * 11 + [1e-4] * 11
    assert [alarm.jumped(loss, inputs, targets) for loss in losses] == [None] * 22
    assert alarm.jumped(0.19, inputs, targets) is None
    assert [alarm.jumped(loss, inputs, targets) for loss in [1e-4] * 11] == [None] * 11
    assert alarm.jumped(0.3, inputs, targets) is not None


def test_tensorboard_has_histograms_of_watched_steps(tmp_path: Path) -> None:
    event_accumulator: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer = new_run(settings("static", epochs=1), tmp_path / "run", Console(file=io.StringIO()))
    trainer.watched_every = 2
    trainer.fit()
    events = event_accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard" / "steps"))
    events.Reload()
    tags = events.Tags()
    assert {"effective_bits/x", "effective_bits/w", "effective_bits/g"} <= set(tags["histograms"])
    assert any(tag.startswith("sqnr/block.3/x.FW") or tag.startswith("sqnr/block.0/x.FW") for tag in tags["scalars"])
