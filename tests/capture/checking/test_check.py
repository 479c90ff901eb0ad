"""What counts as a difference between a model and its graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx.capture import record
from fractrain_fx.capture.checking.check import find_mismatch, trials_of
from fractrain_fx.capture.inputs.call import describe_call
from fractrain_fx.capture.state import Snapshot


class Unread(nn.Module):
    """Its second weight changes nothing, so that its gradient is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.unread = nn.Parameter(torch.full((4,), 2.0)), nn.Parameter(torch.full((4,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.read + 0 * self.unread


@pytest.mark.parametrize(("noise", "equal"), [(1e-8, True), (1e-2, False)])
def test_a_gradient_that_is_zero_but_for_rounding_is_no_difference(noise: float, equal: bool) -> None:
    model, x = Unread(), torch.randn(2, 4)
    recorded = record(model, (x,)).train
    snapshot = Snapshot(model)
    (_, trial), _ = trials_of(snapshot, describe_call(model, (x,), {}), 0)
    assert find_mismatch(snapshot, recorded, trial) is None
    # As if another path of the model, or another run of it, had left this much.
    gradients = dict(trial.expected.gradients, unread=torch.tensor([noise, 0.0, -noise, 0.0]))
    other = replace(trial, expected=replace(trial.expected, gradients=gradients))
    found = find_mismatch(snapshot, recorded, other)
    assert (found is None) == equal
    assert equal or (found is not None and found.names == ("unread",))
