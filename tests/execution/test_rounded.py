"""An op gets the activation that the op before rounded, as long as it would round the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fractrain_fx.execution.plan import Factor, Rounds
from fractrain_fx.execution.rounded import FIRST, SECOND, round_factor
from fractrain_fx.formats import AffineFormat
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.kernels.formats import AffineByKernels

BITS = torch.tensor([3, 4, 6, 3])


def by_sample(fmt: AffineFormat, x: Tensor, bits: Tensor) -> Tensor:
    return fmt.activation(x, bits.view(-1, 1, 1), fmt.activation_range(x))


@pytest.mark.parametrize("fmt", [AffineFormat(), AffineByKernels()])
def test_an_activation_that_the_op_before_rounded_is_not_rounded_again(fmt: AffineFormat) -> None:
    factor, x = Factor(fmt, (3, 4, 6), BatchAxis(), "matrices"), torch.randn(4, 5, 20)
    first = round_factor(factor, x, Rounds(BITS, fmt.activation_range(x)), FIRST).values
    assert torch.equal(first, by_sample(fmt, x, BITS))
    first.fill_(7)  # shows whether its memory is written again
    again = round_factor(factor, x, Rounds(BITS.clone(), fmt.activation_range(x)), FIRST).values
    assert again is first and (again == 7).all()
    other = round_factor(factor, x, Rounds(BITS + 1, fmt.activation_range(x)), FIRST).values
    assert torch.equal(other, by_sample(fmt, x, BITS + 1))
    x.add_(1)
    written = round_factor(factor, x, Rounds(BITS + 1, fmt.activation_range(x)), FIRST).values
    assert torch.equal(written, by_sample(fmt, x, BITS + 1))


@pytest.mark.parametrize("fmt", [AffineFormat(), AffineByKernels()])
def test_a_weight_may_change_without_a_sign(fmt: AffineFormat) -> None:
    factor, w = Factor(fmt, (), BatchAxis(), "matrices", True, 0), torch.randn(20, 20)
    for _ in range(2):
        found = round_factor(factor, w, Rounds(torch.tensor(4), None), SECOND)
        assert torch.equal(found.values, fmt.weight(w, 4, dim=0))
        w.data.mul_(2)  # no new version
