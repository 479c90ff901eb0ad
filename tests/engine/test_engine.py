"""The engine in a loop: stages, costs, bad losses, and continuing a run."""

import json
import math
import warnings
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import nn

from fractrain_fx.config import ByLength, FracConfig, GateConfig, RunConfig, Steps
from fractrain_fx.config.precision import Precision, PrecisionStages
from fractrain_fx.engine import Engine, StageChange
from fractrain_fx.errors import ConfigError, FracTrainWarning, InputError, NonFiniteLossError, RunError
from tests.engine.fake import FakeModel


def epoch(engine: Engine, model: FakeModel, loss: float = 1.0, steps: int = 2) -> StageChange | None:
    for _ in range(steps):
        model(4)
        engine.loss(torch.tensor(loss))
    return engine.end_epoch()


def test_fractrain_moves_its_target_and_says_so() -> None:
    model = FakeModel()
    engine = Engine(model)
    changes = [epoch(engine, model) for _ in range(5)]
    assert changes[:4] == [None] * 4
    assert changes[4] == StageChange(5, 0, 1, 1.5, 2.0)
    assert str(changes[4]) == "epoch 5: stage 1 -> 2, cp 1.50 % -> cp 2.00 %"
    assert engine.stage == 1 and not engine.ledger.turning_points
    epoch(engine, model)
    assert engine.ledger.turning_points == (5,)
    with pytest.raises(FrozenInstanceError):
        changes[4].epoch = 1  # type: ignore[misc]


def test_pfq_sets_the_precision_of_each_stage() -> None:
    stages = PrecisionStages.parse("FW(3,4,6,8)/BW(6,6,8,8)")
    model = FakeModel(FracConfig(method="pfq", stages=stages, schedule="manual", run=RunConfig(length=4)))
    engine = Engine(model)
    changes = [epoch(engine, model) for _ in range(4)]
    assert model.precisions == list(stages.stages)
    assert str(changes[0]) == "epoch 1: stage 1 -> 2, FW-3/BW-6 -> FW-4/BW-6"


@pytest.mark.parametrize(("method", "level"), [("dfq", 3.0), ("slu", 3.0), ("static", Precision(8, 8))])
def test_methods_with_one_stage_never_move(method: str, level: object) -> None:
    model = FakeModel(FracConfig(method=method))  # type: ignore[arg-type]
    engine = Engine(model)
    for _ in range(6):
        model(4, k=1)
        engine.loss(torch.tensor(1.0))
        assert engine.end_epoch() is None
    assert engine.levels == (level,)


def test_ungated_methods_leave_the_loss_alone_and_keep_the_ledger() -> None:
    model = FakeModel(FracConfig(method="static"))
    engine = Engine(model)
    model(4)
    assert engine.loss(torch.tensor(1.25)) == 1.25
    engine.end_epoch()
    assert engine.ledger.mean_cp == pytest.approx(0.0625)


def test_the_cost_term_pushes_towards_the_target() -> None:
    model = FakeModel(FracConfig(targets=(0.5, 3.0)))
    engine = Engine(model)
    model(4)
    assert engine.loss(torch.tensor(1.0)) > 1
    engine._course.stage = 1
    assert engine.loss(torch.tensor(1.0)) < 1


def test_the_ledger_counts_macs_and_choices() -> None:
    model = FakeModel()
    engine = Engine(model)
    model(4, k=1)
    engine.loss(torch.tensor(1.0))
    model(12, k=2)
    engine.loss(torch.tensor(2.0))
    low, high = (float(c) for c in (6 * 2 + 6 * 6 + 2 * 6, 6 * 3 + 6 * 6 + 3 * 6))
    cp = (4 * low + 12 * high) / 16 / 3072
    engine.end_epoch()
    (row,) = engine.ledger.rows
    assert row.loss == pytest.approx(1.75)  # by samples, not by steps
    assert row.cp == pytest.approx(cp) and row.cp_total == pytest.approx(cp + 0.1)
    assert row.options["block0"] == pytest.approx((0, 0.25, 0.75, 0, 0, 0, 0))
    assert engine.ledger.total_macs == pytest.approx(3 * 40 * (cp + 0.1) * 16)
    assert engine.ledger.mean_cp_total == pytest.approx(cp + 0.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_step_is_named_and_never_advances_the_stage(bad: float) -> None:
    model = FakeModel()
    engine = Engine(model)
    for _ in range(4):
        epoch(engine, model)
    for loss in (1.0, bad, 1.0, bad):
        model(4)
        engine.loss(torch.tensor(loss))
    with pytest.raises(NonFiniteLossError, match="step 2 of epoch 5"):
        engine.check_finite()
    with pytest.raises(NonFiniteLossError, match="step 2 of epoch 5"):
        engine.end_epoch()
    assert engine.stage == 0 and engine.ledger.rows[-1].loss is None
    assert epoch(engine, model) is not None  # the window held four good losses, this is the fifth


def test_a_bad_mean_loss_is_refused() -> None:
    model = FakeModel()
    engine = Engine(model)
    model(4)
    engine.loss(torch.tensor(1.0))
    with pytest.raises(NonFiniteLossError, match="mean loss of epoch 1"):
        engine.end_epoch(math.nan)


def test_a_given_mean_loss_is_what_the_indicator_sees() -> None:
    model = FakeModel()
    engine = Engine(model)
    changes = []
    for index in range(5):
        model(4)
        engine.loss(torch.tensor(10.0 ** (5 - index)))
        changes.append(engine.end_epoch(1.0))
    assert changes[-1] is not None


def test_state_continues_a_run_and_is_json() -> None:
    config = FracConfig(method="pfq", stages="FW(3,4,8)/BW(6,6,8)")
    model = FakeModel(config)
    engine = Engine(model)
    for _ in range(7):
        epoch(engine, model)
    other_model = FakeModel(config)
    other = Engine(other_model)
    other.load_state_dict(json.loads(json.dumps(engine.state_dict())))
    assert other.stage == 1 and other_model.precisions[-1] == Precision(4, 6)
    assert other.ledger.to_dict() == engine.ledger.to_dict()
    assert [str(epoch(engine, model)) for _ in range(4)] == [str(epoch(other, other_model)) for _ in range(4)]


def test_a_state_of_more_stages_is_refused() -> None:
    model = FakeModel(FracConfig(schedule="manual", run=RunConfig(length=4)))
    engine = Engine(model)
    epoch(engine, model)
    epoch(engine, model)
    with pytest.raises(RunError, match="stage 3"):
        Engine(FakeModel(FracConfig(targets=(1.5, 2)))).load_state_dict(engine.state_dict())


@pytest.mark.parametrize(
    ("saved", "mine"),
    [
        (FracConfig(), FracConfig(schedule="manual", run=RunConfig(length=4))),
        (FracConfig(method="dfq"), FracConfig()),
    ],
)
def test_a_state_of_another_schedule_is_refused(saved: FracConfig, mine: FracConfig) -> None:
    engine = Engine(FakeModel(mine))
    before = engine.state_dict()
    with pytest.raises(RunError, match=r"another schedule .* resume with the configuration that the run started with"):
        engine.load_state_dict(Engine(FakeModel(saved)).state_dict())
    assert engine.state_dict() == before


@pytest.mark.parametrize("control", ["sign", "multiplier"])
def test_a_state_that_is_loaded_within_an_optimizer_step_begins_a_new_one(control: Any) -> None:
    config = FracConfig(targets=(2.5, 3.0), gate=GateConfig(control=control), schedule=ByLength(every=Steps(2)))

    def terms(engine: Engine) -> list[float]:
        found = []
        for number in range(8):
            engine.model(4, k=1 + number % 5)  # type: ignore[operator]
            found.append(float(engine.loss(torch.zeros(())).detach()))
            if number % 4 == 3:
                engine.end_step()
        return found

    engine = Engine(FakeModel(config), accumulate=4, length=Steps(8))
    state = json.loads(json.dumps(engine.state_dict()))
    for _ in range(2):
        engine.model(4, k=5)  # type: ignore[operator]
        engine.loss(torch.zeros(()))
    engine.load_state_dict(state)
    assert terms(engine) == terms(Engine(FakeModel(config), accumulate=4, length=Steps(8)))


def test_a_loop_owes_nothing_for_losses_before_a_state_was_loaded() -> None:
    model = FakeModel()
    engine = Engine(model)
    state = engine.state_dict()
    model(4)
    engine.loss(torch.zeros(()))
    engine.load_state_dict(state)
    engine.require_backward("this loop")


def at_the_end_of_a_step(config: FracConfig, steps: int, **length: Any) -> Engine:
    """An engine in the middle of an epoch and of a window."""
    model = FakeModel(config)
    engine = Engine(model, **length)
    for number in range(steps):
        model(4)
        engine.loss(torch.tensor(1.0 + number))
        engine.end_step()
        if number % 5 == 4:
            engine.end_epoch()
    return engine


@pytest.mark.parametrize(
    ("part", "broken"),
    [
        ("schedule", {"stage": 2, "plateau": {"epsilon": 0.1, "window": [1.0], "first": [1.0]}}),  # of no known length
        ("ledger", {"macs": 7}),
        ("cost_term", {"integral": "high"}),
        ("clock", {"steps": 40, "tokens": 0, "window": {"steps": 1}}),
        ("open_epoch", {"steps": 3}),
    ],
)
def test_a_state_that_is_refused_changes_nothing(part: str, broken: dict[str, Any]) -> None:
    config = FracConfig(schedule=ByLength(every=Steps(2)), gate=GateConfig(control="multiplier"))
    engine = at_the_end_of_a_step(config, 7, length=Steps(40))
    other = at_the_end_of_a_step(config, 13, length=Steps(40))
    other.load_state_dict(other.state_dict())  # which takes it
    before = json.dumps(engine.state_dict())
    with pytest.raises((RunError, KeyError, ValueError)):
        engine.load_state_dict({**other.state_dict(), part: broken})
    assert json.dumps(engine.state_dict()) == before
    for each in (engine, again := at_the_end_of_a_step(config, 7, length=Steps(40))):
        each.model(4)  # type: ignore[operator]
        each.loss(torch.tensor(3.0))
        each.end_step()
        each.end_epoch()
    assert engine.state_dict() == again.state_dict()


def test_a_users_schedule_may_be_anything_that_maps_losses_to_stages() -> None:
    class Last:
        def update(self, loss: float) -> int:
            return 3 if loss < 1 else 9

        def state_dict(self) -> dict[str, object]:
            return {}

        def load_state_dict(self, state: object) -> None: ...

    model = FakeModel()
    engine = Engine(model, schedule=Last())
    assert epoch(engine, model, loss=0.5) == StageChange(1, 0, 3, 1.5, 3.0)
    with pytest.raises(ConfigError, match=r"returned 9 after epoch 2: .* up to 3 for stage 4"):
        epoch(engine, model, loss=2.0)


def test_wrapped_models_are_found_and_plain_ones_refused() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model = FakeModel()
    assert Engine(Wrapper(model)).model is model
    with pytest.raises(InputError, match="fractrainify"):
        Engine(nn.Linear(2, 2))


def test_misuse_is_explained() -> None:
    model = FakeModel()
    engine = Engine(model)
    with pytest.raises(InputError, match="call the model on a batch first"):
        engine.loss(torch.tensor(1.0))
    model(4)
    with pytest.raises(InputError, match="mean"):
        engine.loss(torch.ones(4))
    with pytest.raises(RunError, match="without a training step"):
        engine.end_epoch()
    with pytest.raises(ConfigError, match="accumulate"):
        Engine(model, accumulate=0)


@pytest.mark.parametrize(
    "arguments",
    [
        *({"weight": weight} for weight in (0, -1, math.nan, math.inf, "a", True)),
        *({"mean": mean} for mean in (3.0, torch.ones(3))),
        *({"tokens": tokens} for tokens in (-2, 2.5, "a")),
        *({"labels": labels} for labels in (3, torch.ones(3))),
    ],
)
def test_wrong_arguments_of_loss_say_what_to_pass(arguments: dict[str, Any]) -> None:
    model = FakeModel()
    engine = Engine(model)
    model(4)
    with pytest.raises(InputError, match=f"engine.loss got {next(iter(arguments))}=.*: pass the"):
        engine.loss(torch.tensor(1.0), **arguments)
    assert engine.steps == 0


@pytest.mark.parametrize("mean_loss", ["a", torch.ones(2)])
def test_the_mean_loss_of_an_epoch_is_a_number(mean_loss: Any) -> None:
    model = FakeModel()
    engine = Engine(model)
    model(4)
    engine.loss(torch.tensor(1.0))
    with pytest.raises(InputError, match=r"mean_loss=.*: pass the mean loss of the epoch"):
        engine.end_epoch(mean_loss)
    engine.end_epoch(torch.tensor(1.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("accumulate", [0, "3", None, 2.5, True])
def test_an_optimizer_step_has_a_whole_number_of_batches(accumulate: Any) -> None:
    with pytest.raises(ConfigError, match=r"accumulate=.* must be a whole number of batches"):
        Engine(FakeModel(), accumulate=accumulate)


def test_a_state_taken_within_an_epoch_continues_it() -> None:
    whole, model = Engine(FakeModel()), FakeModel()
    engine = Engine(model)
    for one in (engine, whole):
        for loss, k in ((1.0, 1), (math.inf, 2)):
            one.model(4, k=k)  # type: ignore[operator]
            one.loss(torch.tensor(loss))
    other = Engine(FakeModel())
    other.load_state_dict(json.loads(json.dumps(engine.state_dict())))
    assert other.steps == 2
    for one in (other, whole):
        one.model(8, k=3)  # type: ignore[operator]
        one.loss(torch.tensor(2.0))
        with pytest.raises(NonFiniteLossError, match="step 2 of epoch 1"):
            one.end_epoch()
    assert other.ledger.to_dict() == whole.ledger.to_dict()
    assert "open_epoch" not in other.state_dict()


@pytest.mark.parametrize("method", ["fractrain", "static"])
def test_an_epoch_of_empty_batches_costs_nothing_and_moves_no_stage(method: str) -> None:
    model = FakeModel(FracConfig(method=method, targets=(1.5, 3.0)) if method == "fractrain" else FracConfig(method))  # type: ignore[arg-type]
    engine = Engine(model)
    epoch(engine, model)
    before, state = engine.ledger.total_macs, engine.state_dict()["schedule"]
    for _ in range(2):
        model(0)
        engine.loss(torch.tensor(math.nan))  # the mean of no losses
    assert engine.end_epoch() is None
    row = engine.ledger.rows[-1]
    assert (row.samples, row.loss, row.cp, row.cp_total) == (0, None, 0, 0) and "loss of no sample" in str(row)
    assert engine.ledger.total_macs == before and engine.state_dict()["schedule"] == state
    epoch(engine, model)
    assert [row.samples for row in engine.ledger.rows] == [8, 0, 8]


def test_a_run_of_empty_batches_has_no_mean_cost() -> None:
    model = FakeModel(FracConfig(targets=(1.5, 3.0), run=RunConfig(length=1)))
    engine = Engine(model)
    model(0)
    engine.loss(torch.tensor(math.nan))
    engine.end_epoch()
    ledger = engine.ledger
    assert ledger.total_macs == 0 and math.isnan(ledger.mean_cp) and "none of the samples" in ledger.stages
    json.dumps(engine.state_dict(), allow_nan=False)


def test_a_loss_weighs_by_its_labels_and_one_of_no_labels_by_nothing() -> None:
    whole, model = Engine(FakeModel()), FakeModel()
    engine = Engine(model)
    for one in (engine, whole):
        for loss, labels in ((2.0, 3), (math.nan, 0)):
            one.model(4)  # type: ignore[operator]
            one.loss(torch.tensor(0.5), mean=torch.tensor(loss), labels=torch.tensor(labels))
    other = Engine(FakeModel())
    other.load_state_dict(json.loads(json.dumps(engine.state_dict(), allow_nan=False)))
    for one in (other, whole):
        one.model(8)  # type: ignore[operator]
        one.loss(torch.tensor(4.0), labels=torch.tensor(1))
        one.end_epoch()
        (row,) = one.ledger.rows
        assert row.loss == pytest.approx((3 * 2.0 + 1 * 4.0) / 4) and row.samples == 16
    assert other.ledger.to_dict() == whole.ledger.to_dict()


def test_the_schedule_does_not_see_an_epoch_without_labels() -> None:
    model = FakeModel(FracConfig(targets=(1.5, 3.0), run=RunConfig(length=2)))
    engine = Engine(model)
    state = engine.state_dict()["schedule"]
    model(4)
    engine.loss(torch.tensor(0.0), mean=torch.tensor(math.nan), labels=torch.tensor(0))
    assert engine.end_epoch() is None and engine.state_dict()["schedule"] == state
    model(4)
    engine.loss(torch.tensor(math.inf), labels=torch.tensor(2))
    with pytest.raises(NonFiniteLossError, match="step 1 of epoch 2"):
        engine.end_epoch()


def test_a_loop_that_scales_its_losses_says_how() -> None:
    model = FakeModel(FracConfig(targets=(0.1,), gate=GateConfig(control="sign")))
    engine = Engine(model, accumulate=4)
    terms = []
    for scaled, weight in ((1.0, None), (0.25, 1), (1.0, 4)):
        engine.start_step()
        model(4)
        terms.append(float(engine.loss(torch.tensor(scaled), mean=torch.tensor(1.0), weight=weight).detach()) - scaled)
    assert terms[0] == pytest.approx(terms[2]) and terms[1] == pytest.approx(terms[0] / 4)
    engine.end_epoch()
    assert engine.ledger.rows[0].loss == pytest.approx(1.0)


def test_the_indicator_may_see_the_cost_term_too() -> None:
    gate = GateConfig(beta=0.5, control="sign")

    def seen_by(indicator: str, accumulate: int = 1, weight: float | None = None) -> float:
        config = FracConfig(targets=(1.0, 3.0), schedule=ByLength(indicator=indicator), gate=gate)  # type: ignore[arg-type]
        model = FakeModel(config)
        engine = Engine(model, accumulate=accumulate)
        for _ in range(2):
            model(4)
            engine.loss(torch.tensor(1.0), weight=weight)
        engine.end_epoch()
        assert engine.ledger.rows[0].loss == 1.0
        return float(engine.state_dict()["schedule"]["plateau"]["window"][0])

    assert seen_by("task") == 1.0
    model = FakeModel(FracConfig(targets=(1.0, 3.0), gate=gate))
    model(4)
    total = float(Engine(model).loss(torch.tensor(1.0)).detach())
    assert total > 1.1 and seen_by("total") == pytest.approx(total)
    # Two batches a step: its cost term has all their samples, whoever divides the loss.
    assert seen_by("total", accumulate=2) - 1 == pytest.approx(2 * (total - 1))
    assert seen_by("total", accumulate=2, weight=1.0) - 1 == pytest.approx(2 * (total - 1))


def test_an_engine_that_does_not_know_the_length_says_so_once_and_one_that_does_is_silent(recwarn: Any) -> None:
    model = FakeModel()
    engine = Engine(model)
    with pytest.warns(
        FracTrainWarning,
        match=r"of 4 after 15 epochs at the soonest, and maybe never: write Engine\(model, epochs=",
    ):
        epoch(engine, model, steps=1)
    epoch(engine, model)
    epoch(Engine(model, epochs=3), model)
    counted = FakeModel(FracConfig(schedule=ByLength(every=Steps(5))))
    counted(4)
    with pytest.warns(
        FracTrainWarning,
        match=r"15 windows of 5 steps at the soonest, and maybe never: write Engine\(model, length=",
    ):
        Engine(counted).loss(torch.tensor(1.0))
    named = FakeModel(FracConfig(schedule="auto"))
    epoch(Engine(named), named)
    assert not [each for each in recwarn if each.category is FracTrainWarning]


def test_a_run_that_is_too_short_says_so_before_it_starts_and_at_its_end() -> None:
    model = FakeModel(FracConfig(schedule="two-stage"))
    with pytest.warns(
        FracTrainWarning, match="cannot reach its last stage: schedule='two-stage' begins stage 2 after 5"
    ):
        engine = Engine(model, epochs=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FracTrainWarning)
        Engine(FakeModel(FracConfig(schedule="by-length")), epochs=3)  # the schedule that the warning names
    for _ in range(2):
        epoch(engine, model)
    with pytest.warns(FracTrainWarning, match=r"ended before its last stage.*cp 1.50 % for 100 %.*; never cp 3.00 %"):
        epoch(engine, model)


def test_a_schedule_of_ones_own_may_say_how_soon_it_reaches_its_last_stage() -> None:
    class Late:
        soonest = 7

        def update(self, loss: float) -> int:
            return 0

        def state_dict(self) -> dict[str, Any]:
            return {}

        load_state_dict = state_dict

    with pytest.warns(FracTrainWarning, match="the schedule Late begins stage 4 after 7 epochs at the soonest"):
        Engine(FakeModel(), epochs=7, schedule=Late())  # type: ignore[arg-type]


def test_a_loop_tells_its_length_before_its_first_step_and_not_later() -> None:
    model = FakeModel(FracConfig(method="pfq"))
    engine = Engine(model)
    engine.expect(epochs=2)
    told = "the length of the run: 2 epochs for 4 stages"
    assert (engine.stage, engine.schedule) == (0, told)
    epoch(engine, model)
    assert engine.stage == 3 and model.precisions[-1] == Precision(8, 8)
    engine.expect(epochs=300)
    assert engine.schedule == told


def test_a_paused_engine_counts_nothing() -> None:
    model = FakeModel()
    engine = Engine(model, epochs=2)
    model(4)
    with engine.paused():
        assert engine.loss(torch.tensor(1.0)) == 1.0
    assert engine.steps == 0
    epoch(engine, model)
    assert [row.samples for row in engine.ledger.rows] == [8]


def test_engine_and_ledger_print_as_tables_and_lines() -> None:
    model = FakeModel(FracConfig(method="pfq", stages="FW(3,4,6,8)/BW(6,6,8,8)"))
    engine = Engine(model, epochs=12)
    assert str(engine.ledger) == "no epoch yet"
    for _ in range(12):
        epoch(engine, model)
    assert repr(engine).splitlines() == [
        "Engine: pfq, stage 4 of 4 by Algorithm 1, with the last stage begun at 75 % of the run",
        "   stage      level  samples",
        "       1  FW-3/BW-6       24",
        "       2  FW-4/BW-6       24",
        "       3  FW-6/BW-8       24",
        ">      4  FW-8/BW-8       24",
    ]
    lines = str(engine.ledger).splitlines()
    assert len(lines) == 13
    assert lines[0] == "epoch   1  stage 1 (FW-3/BW-6)  loss 1.0000  cp 6.25 %  cp_total 16.25 %"
    assert lines[-1].startswith("stages: FW-3/BW-6 for 25 %, FW-4/BW-6 for 25 %")
    table = repr(engine.ledger).splitlines()
    assert table[0] == "Ledger: 12 epochs, mean cp 6.25 %, 1.872e+03 MACs at 32 bits"
    assert table[1].split() == ["epoch", "stage", "level", "loss", "cp,", "%", "cp_total,", "%", "samples"]
    assert len(table) == 13 and table[7].split() == ["..."] * 7 and max(map(len, table)) < 80
