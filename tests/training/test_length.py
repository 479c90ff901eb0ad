"""Numbers of batches and steps before an epoch are sums over the epochs before it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fractrain_fx.training import TrainSettings
from fractrain_fx.training.length import RunLength

counts, or_none = st.integers(1, 9), st.none() | st.integers(1, 40)


@given(counts, or_none, or_none, counts, counts)
def test_what_comes_before_an_epoch_is_the_sum_of_the_epochs_before_it(
    epochs: int, iterations: int | None, epoch_steps: int | None, accumulate: int, pass_batches: int
) -> None:
    settings = TrainSettings(epochs=epochs, iterations=iterations, epoch_steps=epoch_steps, accumulate=accumulate)
    length = RunLength(settings, pass_batches)
    for epoch in range(length.epochs + 1):
        assert length.batches_before(epoch) == sum(map(length.batches, range(epoch)))
        assert length.steps_before(epoch) == sum(map(length.steps, range(epoch)))
    for epoch in range(length.epochs):
        steps = [length.step_of(epoch, batch) for batch in range(1, length.batches(epoch) + 1)]
        ends = [size for size, ends in steps if ends]
        assert sum(ends) == length.batches(epoch) and len(ends) == length.steps(epoch)
        assert [size for size, _ in steps] == [size for size in ends for _ in range(size)]
    assert length.steps_before(length.epochs) == (iterations or epochs * length.epoch_steps)
