"""Per-sample values must reach the rows of their own sample, wherever the samples lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fractrain_fx.formats.batch_axis import BatchAxis

BATCH = 3


def folded(axis: BatchAxis) -> tuple[Tensor, Tensor]:
    """A tensor laid out as ``axis`` says, and the index of the sample that each of its values belongs to."""
    per_sample = torch.randn(BATCH, axis.factor, 4, 5)
    owner = torch.arange(BATCH).view(-1, 1, 1, 1).expand_as(per_sample)

    def fold(x: Tensor) -> Tensor:
        rows = x if axis.major else x.transpose(0, 1)
        return rows.reshape(-1, 4, 5).movedim(0, axis.axis)

    return fold(per_sample), fold(owner)


AXES = [BatchAxis(axis, factor, major) for axis in (0, 1, 2) for factor, major in ((1, True), (4, True), (4, False))]


@pytest.mark.parametrize("axis", AXES, ids=str)
def test_expand_gives_each_value_that_of_its_sample(axis: BatchAxis) -> None:
    x, owner = folded(axis)
    assert torch.equal(axis.expand(torch.arange(BATCH), x.shape).expand_as(x), owner)


@pytest.mark.parametrize("axis", AXES, ids=str)
def test_samples_first_gathers_each_sample_in_a_row(axis: BatchAxis) -> None:
    x, owner = folded(axis)
    rows = axis.samples_first(owner)
    assert torch.equal(rows, torch.arange(BATCH).view(-1, 1).expand_as(rows))
    for sample, row in enumerate(axis.samples_first(x)):
        assert torch.equal(row.sort().values, x[owner == sample].sort().values)


def test_one_value_a_sample() -> None:
    assert BatchAxis().samples_first(torch.arange(3)).tolist() == [[0], [1], [2]]
    assert BatchAxis().expand(torch.arange(3), (3,)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("major", [True, False])
def test_a_call_may_have_more_rows_a_sample_than_were_recorded(major: bool) -> None:
    recorded, x = BatchAxis(0, 2, major), torch.arange(12.0).view(12, 1)
    owner = torch.arange(3).repeat_interleave(4) if major else torch.arange(3).repeat(4)
    assert torch.equal(recorded.expand(torch.arange(3), x.shape)[:, 0], owner)
    rows = recorded.samples_first(owner.view(12, 1), 3)
    assert torch.equal(rows, torch.arange(3).view(-1, 1).expand(3, 4))
