"""Each schedule walks the levels as ALGORITHM 6 says."""

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractrain_fx.config import ByLength, Cyclic, Fixed, FracConfig, LossPlateau, Manual, RunConfig, Schedule, Steps
from fractrain_fx.config.precision import Precision
from fractrain_fx.engine.schedules import (
    LoopLength,
    StagePlan,
    StageSchedule,
    lacks_length,
    plan_stages,
)
from fractrain_fx.errors import ConfigError

STAGES = tuple(Precision(*bits) for bits in ((3, 6), (4, 6), (6, 8), (8, 8)))
TARGETS = (1.5, 2.0, 2.5, 3.0)


def walk(plan: StagePlan, losses: list[float]) -> list[int]:
    """The stage of each epoch."""
    return [0] + [plan.schedule.update(loss) for loss in losses[:-1]]


def test_auto_moves_at_turning_points_and_stays_at_the_last_stage() -> None:
    plan = plan_stages(FracConfig(), TARGETS)
    assert plan.levels == TARGETS
    assert walk(plan, [1.0] * 25) == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 10


def test_two_stage_keeps_the_ends() -> None:
    plan = plan_stages(FracConfig(method="pfq", schedule="two-stage"), STAGES)
    assert plan.levels == (Precision(3, 6), Precision(8, 8))
    assert walk(plan, [1.0] * 12) == [0] * 5 + [1] * 7


def test_manual_gives_each_stage_the_same_number_of_epochs() -> None:
    plan = plan_stages(FracConfig(schedule="manual", run=RunConfig(length=8)), TARGETS)
    assert walk(plan, [float(-epoch) for epoch in range(10)]) == [0, 0, 1, 1, 2, 2, 3, 3, 3, 3]


def test_cyclic_goes_from_the_first_to_the_last_precision_in_each_cycle() -> None:
    plan = plan_stages(FracConfig(method="pfq", run=RunConfig(length=12), schedule=Cyclic(cycles=2)), STAGES)
    precisions = [plan.levels[stage] for stage in walk(plan, [1.0] * 12)]
    assert precisions[:6] == precisions[6:]
    assert precisions[0] == Precision(3, 6) and precisions[5] == Precision(8, 8)
    bits = [precision.fw for precision in precisions[:6] if isinstance(precision, Precision)]
    assert bits == sorted(bits) and len(set(bits)) > 3


def test_cyclic_ends_with_the_last_target_and_interpolates_targets() -> None:
    plan = plan_stages(FracConfig(run=RunConfig(length=7), schedule=Cyclic(cycles=2)), TARGETS)
    targets = [plan.levels[stage] for stage in walk(plan, [1.0] * 7)]
    assert targets[0] == targets[3] == 1.5
    assert targets[2] == targets[-1] == 3.0
    assert targets[1] == pytest.approx(2.25)


def test_cyclic_refuses_cycles_shorter_than_two_epochs() -> None:
    with pytest.raises(ConfigError, match="cycles=3"):
        plan_stages(FracConfig(run=RunConfig(length=7), schedule=Cyclic(cycles=8)), TARGETS)


def test_constant_holds_the_last_level() -> None:
    plan = plan_stages(FracConfig(schedule="constant"), TARGETS)
    assert plan.levels == (3.0,) and walk(plan, [1.0] * 9) == [0] * 9


@pytest.mark.parametrize("schedule", ["by-length", "auto", "two-stage", "manual", Cyclic(2), "constant"])
def test_every_schedule_continues_from_its_state(schedule: Any) -> None:
    config = FracConfig(schedule=schedule, run=RunConfig(length=20))
    first, second = plan_stages(config, TARGETS).schedule, plan_stages(config, TARGETS).schedule
    assert isinstance(first, StageSchedule)
    for _ in range(8):
        first.update(1.0)
    second.load_state_dict(first.state_dict())
    assert [first.update(1.0) for _ in range(12)] == [second.update(1.0) for _ in range(12)]


def test_the_default_is_algorithm_1_in_runs_of_unknown_length() -> None:
    plan = plan_stages(FracConfig(), TARGETS)
    assert plan.windows is None and plan.name == "Algorithm 1" and plan.too_short is None


def test_the_default_begins_a_stage_when_the_loss_is_flat_and_within_bounds() -> None:
    plan = plan_stages(FracConfig(), TARGETS, LoopLength(100))
    assert plan.name == "Algorithm 1, with the last stage begun between 40 and 75 % of the run"
    stages = walk(plan, [1 - 0.03 * epoch for epoch in range(28)] + [0.19] * 72)
    # At its latest moment; when five losses are alike; as soon as it may.
    assert [stages.index(stage) for stage in range(4)] == [0, 25, 31, 40]
    assert plan_stages(FracConfig(run=RunConfig(length=100)), TARGETS).name == plan.name


@pytest.mark.parametrize(
    ("epochs", "bounds"), [(10, "at 70"), (16, "at 75"), (30, "between 50 and 73"), (40, "between 40 and 75")]
)
def test_the_bounds_of_the_last_stage_are_those_of_a_flat_and_of_a_falling_loss(epochs: int, bounds: str) -> None:
    plan = plan_stages(FracConfig(), TARGETS, LoopLength(epochs))
    assert plan.name == f"Algorithm 1, with the last stage begun {bounds} % of the run"
    assert walk(plan, [1.0] * epochs).index(3) == plan.soonest


@given(
    windows=st.integers(3, 300),
    stages=st.integers(2, 4),
    by_steps=st.booleans(),
    seed=st.integers(0, 99),
    slope=st.floats(0, 1),
)
def test_the_default_begins_the_last_stage_in_time_whatever_the_loss(
    windows: int, stages: int, by_steps: bool, seed: int, slope: float
) -> None:
    """Runs of 3 to 300 epochs, and of 500 to 50,000 steps in one epoch, with losses that fall, wander or stay."""
    length = LoopLength(1, 500 * windows // 3) if by_steps else LoopLength(max(windows, stages))
    plan = plan_stages(FracConfig(), TARGETS[-stages:], length)
    assert plan.windows is not None and plan.too_short is None
    draw = random.Random(seed)
    losses = [math.exp(-slope * window) + 0.01 * draw.random() for window in range(plan.windows)]
    seen = walk(plan, losses)
    turn = seen.index(stages - 1)
    assert sorted(set(seen)) == list(range(stages)) and seen == sorted(seen)
    assert turn <= (stages - 1) / stages * plan.windows <= 0.85 * plan.windows
    assert turn >= 0.4 * plan.windows or turn == (stages - 1) * plan.windows // stages


@pytest.mark.parametrize(("epochs", "stages"), [(1, [3]), (2, [0, 3]), (3, [0, 2, 3]), (4, [0, 1, 2, 3])])
def test_the_default_leaves_out_stages_of_a_run_with_fewer_epochs(epochs: int, stages: list[int]) -> None:
    plan = plan_stages(FracConfig(), TARGETS, LoopLength(epochs))
    assert [plan.first, *walk(plan, [1.0] * epochs)[1:]] == stages and plan.too_short is None


@pytest.mark.parametrize(("windows", "words"), [(1, "1 window of 10 steps"), (3, "3 windows of 10 steps")])
def test_a_run_too_short_for_all_stages_says_how_many_windows_it_has(windows: int, words: str) -> None:
    config = FracConfig(schedule=ByLength(every=Steps(10)), run=RunConfig(length=Steps(10 * windows)))
    assert plan_stages(config, TARGETS).name == f"the length of the run: {words} for 4 stages"


def test_a_run_that_was_too_short_for_all_stages_can_be_made_longer() -> None:
    short, longer = (plan_stages(FracConfig(), TARGETS, LoopLength(epochs)).schedule for epochs in (3, 12))
    assert short.update(1.0) == 2
    longer.load_state_dict(json.loads(json.dumps(short.state_dict())))
    assert [longer.update(1 / losses) for losses in range(2, 13)].index(3) + 2 == 12 * 3 // 4


def test_few_epochs_are_divided_by_steps_where_the_loop_counts_them() -> None:
    for length in (LoopLength(1, 400), LoopLength(3, 400), LoopLength(39, 400), LoopLength(None, 400)):
        plan = plan_stages(FracConfig(), TARGETS, length)
        assert plan.every == Steps(10) and plan.windows == 40
        stages = walk(plan, [float(-window) for window in range(40)])
        assert [stages.count(stage) for stage in range(4)] == [10] * 4
    assert plan_stages(FracConfig(), TARGETS, LoopLength(40, 400)).every is None
    assert walk(plan_stages(FracConfig(), TARGETS, LoopLength(1, 3)), [1.0] * 3) == [0, 2, 3]


@pytest.mark.parametrize(
    ("settings", "length", "words"),
    [
        (
            {"schedule": "auto"},
            LoopLength(15),
            "'auto' begins stage 4 after 15 epochs at the soonest, and the run has 15",
        ),
        ({"schedule": "two-stage"}, LoopLength(3), "'two-stage' begins stage 2 after 5 epochs at the soonest"),
        ({"schedule": "manual", "run": RunConfig(length=40)}, LoopLength(8), "'manual' begins stage 4 after 30 epochs"),
        (
            {"schedule": LossPlateau(every=Steps(10))},
            LoopLength(1, 100),
            "after 15 windows of 10 steps at the soonest, and",
        ),
    ],
)
def test_a_run_that_cannot_reach_its_last_stage_says_so_with_the_way_out(
    settings: dict[str, Any], length: LoopLength, words: str
) -> None:
    told = plan_stages(FracConfig(**settings), TARGETS, length).too_short
    assert told is not None and words in told and "schedule='by-length'" in told
    longer = LoopLength((length.epochs or 0) * 20, (length.steps or 0) * 20)
    assert plan_stages(FracConfig(**settings), TARGETS, longer).too_short is None


def test_fixed_stages_begin_at_shares_of_the_run_or_at_steps() -> None:
    shares = plan_stages(FracConfig(run=RunConfig(length=10), schedule=Fixed(turns=(0.3, 0.5, 0.9))), TARGETS)
    assert walk(shares, [1.0] * 10) == [0, 0, 0, 1, 1, 2, 2, 2, 2, 3]
    config = FracConfig(schedule=Fixed(turns=(Steps(200), "250 steps", Steps(500)), every="100 steps"))  # type: ignore[arg-type]
    assert walk(plan_stages(config, TARGETS), [1.0] * 8) == [0, 0, 1, 2, 2, 3, 3, 3]  # 250 falls into the third window


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Fixed((0.5,)), "4 stages have 3 turning points"),
        (Fixed((0.55, 0.56, 0.9)), "leave a stage without an epoch"),
        (Fixed((0.2, 0.5, 0.99)), "leave a stage without an epoch"),
        (Fixed((0.2, 0.5, 0.7), every=Steps(10)), r"length=Steps\(...\)"),
    ],
)
def test_turns_that_do_not_fit_the_run_are_refused(schedule: Fixed, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_stages(FracConfig(schedule=schedule, run=RunConfig(length=10)), TARGETS)


@pytest.mark.parametrize(
    ("schedule", "length", "message"),
    [(Manual(), 3, "3 epochs"), (Manual(every=Steps(10)), Steps(30), "3 windows of 10 steps")],
)
def test_a_manual_run_with_less_than_an_epoch_a_stage_is_refused(schedule: Manual, length: Any, message: str) -> None:
    config = FracConfig(schedule=schedule, run=RunConfig(length=length))
    with pytest.raises(ConfigError, match=message):
        plan_stages(config, TARGETS)
    assert plan_stages(config, TARGETS[:3]).levels == TARGETS[:3]


@pytest.mark.parametrize("schedule", [Manual(), Cyclic(), Fixed((0.3, 0.5, 0.9))])
def test_a_schedule_that_divides_the_run_asks_for_its_length(schedule: Schedule) -> None:
    config = FracConfig(schedule=schedule)
    assert lacks_length(config, TARGETS) and not lacks_length(config.replace(**{"run.length": 20}), TARGETS)
    with pytest.raises(ConfigError, match=r"say how long it is with run\.length=epochs"):
        plan_stages(config, TARGETS)
    assert not lacks_length(config, TARGETS[:1])  # one stage


def test_a_clock_in_steps_divides_the_run_into_windows() -> None:
    run, every = RunConfig(length=Steps(75)), Steps(10)
    manual = plan_stages(FracConfig(schedule=Manual(every=every), run=run), TARGETS)
    assert walk(manual, [1.0] * 8) == [0, 0, 1, 1, 2, 2, 3, 3]
    cyclic = plan_stages(FracConfig(schedule=Cyclic(2, every=every), run=run), TARGETS)
    assert [cyclic.levels[stage] for stage in walk(cyclic, [1.0] * 8)][3::4] == [3.0, 3.0]
    with pytest.raises(ConfigError, match="windows of 10 steps"):
        plan_stages(FracConfig(schedule=Cyclic(5, every=every), run=run), TARGETS)
