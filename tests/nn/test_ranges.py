"""The running range: the first batch's exactly, whatever was measured before it."""

from __future__ import annotations

import pytest
import torch

from fractrain_fx.formats import get_format
from fractrain_fx.nn import ranges
from fractrain_fx.nn.ranges import RunningRange


@pytest.mark.parametrize("readable", [True, False])
def test_the_first_batch_replaces_a_range_that_no_batch_has_filled(
    readable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "readable", lambda _: readable)
    x = torch.tensor([-1.7, 0.1, 2.9])
    running = RunningRange(get_format("affine"))
    running.lo.fill_(-7.3e6)
    running.span.fill_(3.1e7)
    running(torch.tensor([torch.nan, 1.0]))
    assert not running.seen and float(running.lo) == pytest.approx(-7.3e6)
    running(x)
    assert running.seen and running.lo == x.min() and running.span == x.max() - x.min()
