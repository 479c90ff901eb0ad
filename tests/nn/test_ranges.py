"""The running range: the first batch's exactly, whatever was measured before it."""

from __future__ import annotations

import pytest
import torch

from fractrain_fx.formats import get_format, running
from fractrain_fx.nn.ranges import RunningRange


@pytest.mark.parametrize("readable", [True, False])
def test_the_first_batch_replaces_a_range_that_no_batch_has_filled(
    readable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "readable", lambda _: readable)
    x = torch.tensor([-1.7, 0.1, 2.9])
    moving = RunningRange(get_format("affine"))
    moving.lo.fill_(-7.3e6)
    moving.span.fill_(3.1e7)
    moving(torch.tensor([torch.nan, 1.0]))
    assert not moving.seen and float(moving.lo) == pytest.approx(-7.3e6)
    moving(x)
    assert moving.seen and moving.lo == x.min() and moving.span == x.max() - x.min()
