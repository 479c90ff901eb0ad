"""Stages that are counted in optimizer steps and in tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from fractrain_fx.config import ByLength, Fixed, FracConfig, RunConfig, Steps, Tokens
from fractrain_fx.config.precision import Precision
from fractrain_fx.engine import Engine, StageChange
from fractrain_fx.errors import ConfigError, InputError, NonFiniteLossError, RunError
from tests.engine.fake import FakeModel

LOW, HIGH = Precision(4, 4), Precision(8, 8)


def pfq(**settings: Any) -> FracConfig:
    usual: dict[str, Any] = {"method": "pfq", "stages": "FW(4,8)/BW(4,8)", "format": "mx"}
    return FracConfig(**usual | {"schedule": ByLength(every=Steps(3))} | settings)


def step(engine: Engine, model: FakeModel, loss: float = 1.0, batches: int = 1) -> StageChange | None:
    for _ in range(batches):
        model(4)
        engine.loss(torch.tensor(loss))
    return engine.end_step()


def test_a_stage_begins_within_an_epoch_and_the_ledger_has_both_parts() -> None:
    model = FakeModel(pfq(schedule=Fixed(turns=(Steps(3),), every=Steps(3))))
    engine = Engine(model)
    changes = [step(engine, model, loss=float(number)) for number in range(5)]
    assert changes == [None, None, StageChange(1, 0, 1, LOW, HIGH, step=3), None, None]
    assert str(changes[2]) == "epoch 1, step 3: stage 1 -> 2, FW-4/BW-4 -> FW-8/BW-8"
    assert model.precisions == [LOW, HIGH] and engine.steps == 5
    assert engine.end_epoch() is None and engine.steps == 0
    (row,) = engine.ledger.rows
    assert (row.epoch, row.stage, row.samples, row.loss, row.step) == (1, 1, 20, 2.0, 5)
    assert [(part.level, part.samples, part.loss, part.step) for part in row.parts] == [
        ("FW-4/BW-4", 12, 1.0, 3),
        ("FW-8/BW-8", 8, 3.5, 5),
    ]
    step(engine, model)
    engine.end_epoch()
    assert engine.ledger.turning_points == (1,) and engine.ledger.turning_steps == (3,)
    assert engine.ledger.rows[1].parts == () and engine.ledger.rows[1].step == 6


def test_a_stage_that_begins_after_an_epochs_last_step_leaves_the_epoch_whole() -> None:
    model = FakeModel(pfq(schedule=Fixed(turns=(Steps(3),), every=Steps(3))))
    engine = Engine(model)
    assert [step(engine, model) for _ in range(3)][-1] is not None
    assert engine.steps == 3 and engine.end_epoch() is None
    assert [(row.stage, row.parts) for row in engine.ledger.rows] == [(0, ())]


def test_a_window_and_a_part_of_empty_batches_leave_the_schedule_and_the_epochs_means_alone() -> None:
    model = FakeModel(pfq(schedule=Fixed(turns=(Steps(3),), every=Steps(3))))
    engine = Engine(model)

    def empty_step() -> StageChange | None:
        model(0)
        engine.loss(torch.tensor(float("nan")))
        return engine.end_step()

    assert [empty_step() for _ in range(3)] == [None] * 3  # a window
    assert [step(engine, model, loss=2.0) for _ in range(3)][-1] is not None
    assert empty_step() is None  # all of the second part
    assert engine.end_epoch() is None
    (row,) = engine.ledger.rows
    assert [(part.stage, part.samples, part.loss) for part in row.parts] == [(0, 12, 2.0), (1, 0, None)]
    assert (row.samples, row.loss, row.cp) == (12, 2.0, row.parts[0].cp)


def test_an_epoch_whose_parts_are_all_empty_has_no_cost() -> None:
    model = FakeModel(pfq(schedule=Fixed(turns=(Steps(2),), every=Steps(2))))
    engine = Engine(model)
    step(engine, model)
    engine.end_epoch()
    for _ in range(2):  # the first of them ends a window that has the samples of the epoch before
        model(0)
        engine.loss(torch.tensor(float("nan")))
        engine.end_step()
    assert engine.end_epoch() is None and engine.stage == 1
    row = engine.ledger.rows[1]
    assert [part.stage for part in row.parts] == [0, 1]
    assert (row.samples, row.loss, row.cp_total) == (0, None, 0)


def test_the_plateau_sees_windows_of_steps_that_reach_over_epochs() -> None:
    model = FakeModel(pfq())
    engine = Engine(model, accumulate=2)
    changes = []
    for _ in range(8):
        changes += [step(engine, model, batches=2), step(engine, model, batches=2)]
        engine.end_epoch()
    assert [number for number, change in enumerate(changes, 1) if change] == [15]  # five windows of three steps
    assert engine.ledger.turning_points == (8,)


def test_tokens_are_those_of_the_model_or_of_the_loop() -> None:
    model = FakeModel(pfq(schedule=Fixed(turns=(Tokens(150),), every=Tokens(100))))
    engine = Engine(model)
    model.tokens = 40
    changes = [step(engine, model) for _ in range(5)]
    assert changes[4] == StageChange(1, 0, 1, LOW, HIGH, step=5, tokens=200) and changes[:4] == [None] * 4
    assert "step 5, 200 tokens" in str(changes[4])
    model(4)
    engine.loss(torch.tensor(1.0), tokens=7)
    engine.end_step()
    assert engine.state_dict()["clock"]["tokens"] == 207
    model.tokens = None
    with pytest.raises(InputError, match="tokens="):
        step(engine, model)
    model.tokens = 1000
    engine = Engine(model)
    with pytest.raises(ConfigError, match="less than the 1000 tokens"):
        step(engine, model)


@pytest.mark.parametrize("stop", range(1, 12))
def test_a_run_goes_on_at_the_same_step(stop: int) -> None:
    losses = [1.0, 0.9, 0.8, *[0.75] * 9]
    config = pfq(schedule=ByLength(epsilon=0.2, alpha=1.0, every=Steps(2)), stages="FW(4,6,8)/BW(4,6,8)")

    def run(engine: Engine, model: FakeModel, first: int, last: int) -> list[str]:
        told = []
        for number in range(first, last):
            told.append(str(step(engine, model, losses[number])))
            if number % 5 == 4:
                engine.end_epoch()
        return told

    model = FakeModel(config)
    engine = Engine(model)
    whole = run(engine, model, 0, 12)
    first, second = Engine(model), Engine(model)
    told = run(first, model, 0, stop)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert told + run(second, model, stop, 12) == whole
    assert second.state_dict() == engine.state_dict() and "step 12" in whole[11]


def test_a_bad_loss_never_moves_the_stage() -> None:
    model = FakeModel(pfq(schedule=Fixed(turns=(Steps(3),), every=Steps(3))))
    engine = Engine(model)
    step(engine, model)
    step(engine, model, loss=float("nan"))
    with pytest.raises(NonFiniteLossError, match="step 2 since the schedule was last asked"):
        step(engine, model)
    assert engine.stage == 0


def test_a_window_after_one_with_a_bad_loss_is_seen_by_the_schedule() -> None:
    model = FakeModel(pfq(schedule=Fixed(turns=(Steps(4),), every=Steps(2))))
    engine = Engine(model)
    step(engine, model, loss=float("nan"))
    with pytest.raises(NonFiniteLossError, match="step 1 since"):
        step(engine, model)
    changes = [step(engine, model) for _ in range(4)]
    assert changes == [None, None, None, StageChange(1, 0, 1, LOW, HIGH, step=6)]  # the first window was not seen
    assert engine.end_epoch() is None
    assert engine.ledger.rows[0].loss is None


def test_loops_that_do_not_fit_the_clock_are_told_so() -> None:
    model = FakeModel(pfq())
    engine = Engine(model)
    with pytest.raises(RunError, match="end_step was called without"):
        engine.end_step()
    model(4)
    engine.loss(torch.tensor(1.0))
    with pytest.raises(RunError, match=r"engine.end_step\(\) after each optimizer"):
        engine.loss(torch.tensor(1.0))
    with pytest.raises(ConfigError, match="mean_loss changes nothing"):
        engine.end_epoch(mean_loss=1.0)


def test_a_step_that_the_loop_dropped_is_not_counted() -> None:
    model = FakeModel(pfq(schedule=ByLength(every=Tokens(100))))
    engine = Engine(model, accumulate=2)
    model.tokens = 30
    model(4)
    engine.loss(torch.tensor(1.0))  # the loop meets a batch that it cannot use, and begins again
    for _ in range(2):
        engine.start_step()
        step(engine, model, batches=2)
    clock = engine.state_dict()["clock"]
    assert (clock["steps"], clock["tokens"]) == (2, 120)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule.every": "often"}, "100 steps"),
        ({"schedule.every": Steps(10), "run.length": Tokens(100)}, "write a length in steps"),
        ({"schedule.every": Steps(10), "run.length": Steps(9)}, "in steps, and at least that"),
        ({"schedule.every": None, "run.length": Steps(5)}, "write a length in epochs"),
        ({"schedule.turns": (0.5,)}, "ByLength has no field 'turns'"),
        ({"schedule": "fixed"}, "write Fixed"),
        ({"schedule": {"kind": "fixed", "turns": (Tokens(5),), "every": Steps(3)}}, "every='100 tokens'"),
        ({"schedule": {"kind": "fixed", "turns": (1.5,)}}, "between 0 and 1"),
        ({"schedule": {"kind": "fixed", "turns": (Steps(5), Steps(4)), "every": Steps(3)}}, "must rise"),
    ],
)
def test_clocks_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pfq().replace(**settings)


def test_a_clock_is_plain_text_in_files() -> None:
    every: Any = "1_000 steps"
    config = pfq(run=RunConfig(length=Steps(4000)), schedule=Fixed(turns=(0.5,), every=every))
    assert FracConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.to_dict()["schedule"] == {"kind": "fixed", "every": "1000 steps", "turns": [0.5]}
    with pytest.raises(ConfigError, match="1 or more"):
        Steps(0)
