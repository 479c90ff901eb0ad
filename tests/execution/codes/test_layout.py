"""The products of rows on codes: values that codes hide."""

from __future__ import annotations

import pytest
import torch

from fractrain_fx.execution.arithmetic import Arithmetic, Convolution, Linear
from fractrain_fx.execution.codes.layout import Convolved, Features, Layout
from fractrain_fx.execution.plan import Factor, Plan
from fractrain_fx.formats import AffineFormat
from fractrain_fx.formats.batch_axis import BatchAxis


def plan_of(arithmetic: Arithmetic, *static: object) -> Plan:
    fmt, axis = AffineFormat(), BatchAxis()
    factor = Factor(fmt, (), axis, arithmetic.order)
    return Plan(arithmetic, static, factor, factor, fmt, axis)


LINEAR = Features(), plan_of(Linear()), (4, 6)
CONVOLUTION = (
    Convolved((3, 3), (1, 1), (1, 1), (1, 1)),
    plan_of(Convolution((3, 3)), (1, 1), (1, 1), (1, 1), (0, 0), 1),
    (4, 6, 5, 5),
)


@pytest.mark.parametrize(("layout", "plan", "shape"), [LINEAR, CONVOLUTION])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_bad_values_spoil_the_outputs_that_they_enter_and_cost_nothing_without_one(
    layout: Layout, plan: Plan, shape: tuple[int, ...], bad: float
) -> None:
    x = torch.randn(shape)
    assert layout.bad(plan, x) is None
    x[1, 2] = bad
    found = layout.bad(plan, x)
    assert found is not None and found[1].isnan().all()
    assert not found[[0, 2, 3]].any()
