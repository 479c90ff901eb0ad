"""Sensitivities beside the true changes of the loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.numerics.truth import DoubleLoss, factor_changes, gradient_changes, spearman
from fractrain_fx import sensitivity
from fractrain_fx.numerics.sensitivity.float_copy import FloatCopy
from tests.models import thinned
from tests.numerics.trained import Trained, conv_net, gpt2

WIDTHS = (2, 4, 6)


@pytest.mark.parametrize("made", thinned([conv_net, gpt2], 2))
def test_estimates_have_the_order_of_the_true_changes(made: Callable[[], Trained]) -> None:
    model, batches, criterion = made()
    loss = None if criterion is None else DoubleLoss(lambda output: output)
    found = sensitivity(model, batches[:5], criterion=criterion, precisions=WIDTHS)
    copied = FloatCopy(model, batches[0], loss, None)
    keys = [(op.name, bits) for op in found.measured for bits in WIDTHS]
    for operand in ("x", "w"):
        true = factor_changes(copied, operand, WIDTHS, batches[5:7], loss)
        estimates = [found.of(name, operand, bits).change or 0.0 for name, bits in keys]
        assert spearman(estimates, [true[key].even for key in keys]) > 0.8
        assert loss is None or spearman(estimates, [true[key].divergence for key in keys]) > 0.9
    steps = gradient_changes(copied, WIDTHS, batches[5], batches[6:7], rate=0.01)
    noise = [found.of(name, "g", bits).noise or 0.0 for name, bits in keys]
    assert spearman(noise, [steps[key] for key in keys]) > 0.8
