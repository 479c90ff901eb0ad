"""ALGORITHM 6, number by number."""

import math

import pytest

from fractrain_fx.engine.indicator import PlateauIndicator
from fractrain_fx.errors import ConfigError


def fired(losses: list[float], epsilon: float = 0.05, alpha: float = 0.3) -> list[int]:
    plateau = PlateauIndicator(epsilon, alpha)
    return [index for index, loss in enumerate(losses) if plateau.update(loss)]


def test_fires_when_five_losses_lie_within_epsilon_of_the_last() -> None:
    assert fired([1.0] * 4) == []
    assert fired([1.0] * 5) == [4]


def test_every_earlier_loss_of_the_window_counts() -> None:
    assert fired([2.0, 1.0, 1.0, 1.0, 1.0]) == []
    assert fired([2.0, 1.0, 1.0, 1.0, 1.0, 1.0]) == [5]


def test_the_threshold_is_relative_to_the_mean_of_the_first_ten_losses() -> None:
    plateau = PlateauIndicator(0.05, 0.3)
    for loss in [10.0] * 4 + [0.0] * 6:
        plateau.update(loss)
    assert plateau.scale == 4.0
    plateau.update(100.0)
    assert plateau.scale == 4.0


def test_epsilon_shrinks_and_the_window_empties_after_firing() -> None:
    plateau = PlateauIndicator(0.05, 0.3)
    steps = [plateau.update(1.0) for _ in range(10)]
    assert steps == [False] * 4 + [True] + [False] * 4 + [True]
    assert plateau.epsilon == pytest.approx(0.05 * 0.3**2)


def test_a_later_stage_needs_a_flatter_loss() -> None:
    falling = [1.0, 0.99, 0.98, 0.97, 0.96]
    assert fired(falling) == [4]
    plateau = PlateauIndicator(0.05, 0.3)
    for _ in range(5):
        plateau.update(1.0)
    assert not any(plateau.update(loss) for loss in falling)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_never_fires_nor_enters(bad: float) -> None:
    plateau = PlateauIndicator(0.05, 0.3)
    assert [plateau.update(loss) for loss in [1.0, 1.0, bad, 1.0, 1.0, bad]] == [False] * 6
    assert plateau.scale == 1.0
    assert plateau.update(1.0)


def test_negative_and_zero_losses_are_compared_by_magnitude() -> None:
    assert fired([-1.0, -2.0, -3.0, -4.0, -5.0]) == []
    assert fired([-1.0] * 5) == [4]
    assert fired([0.0] * 5) == [4]


def test_state_continues_in_another_indicator() -> None:
    first, second = PlateauIndicator(0.05, 0.3), PlateauIndicator(0.05, 0.3)
    for loss in [3.0, 1.0, 1.0, 1.0]:
        first.update(loss)
    second.load_state_dict(first.state_dict())
    assert [first.update(1.0), first.update(1.0)] == [second.update(1.0), second.update(1.0)] == [False, True]
    assert first.epsilon == second.epsilon and first.scale == second.scale


def test_settings_without_meaning_are_refused() -> None:
    with pytest.raises(ConfigError, match="window"):
        PlateauIndicator(0.05, 0.3, window=1)
