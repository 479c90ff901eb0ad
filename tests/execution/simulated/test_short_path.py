"""The short way of ``rounding="compiled"``: the numbers of the long one, for good and bad values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fractrain_fx.execution.simulated import short_path as by_kernels
from fractrain_fx.execution.simulated.operand import Factor, Rounds
from fractrain_fx.execution.simulated.short_path import has_all_kernels, round_factor, round_gradient, weight_range
from fractrain_fx.formats import AffineFormat, DoReFaFormat
from fractrain_fx.kernels.formats import AffineByKernels
from fractrain_fx.nn.batch_axis import BatchAxis
from fractrain_fx.nn.rounding import rounded_gradient

COMPILED = AffineByKernels()
WEIGHT = Factor(COMPILED, (), BatchAxis(), True, weight=True, channel=0)
ACTIVATION = Factor(COMPILED, (3, 4, 6), BatchAxis(), True)
SLOT = 9


def _weight() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(70, 9, 3)


@pytest.mark.parametrize("bits", [1, 4, 8, 16])
def test_a_weight_is_rounded_while_its_ranges_are_found(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    w, width = _weight(), torch.tensor(bits)
    within = weight_range(WEIGHT, w, width, SLOT)
    assert within is not None
    for found, wanted in zip(within[:2], COMPILED.weight_range(w, dim=0)[:2], strict=True):
        assert torch.equal(found, wanted)
    wanted = COMPILED.weight(w, width, dim=0)
    with monkeypatch.context() as patched:
        patched.delattr(by_kernels, "round_compiled")  # not again
        assert torch.equal(round_factor(WEIGHT, w, Rounds(width, within), SLOT), wanted)  # type: ignore[arg-type]
    w.mul_(2)
    doubled = round_factor(WEIGHT, w, Rounds(width, COMPILED.weight_range(w, dim=0)), SLOT)
    assert doubled is not None and torch.equal(doubled, COMPILED.weight(w, width, dim=0)), "written into since"


@pytest.mark.parametrize("channel", [0, 1])
def test_a_weight_may_change_without_a_sign(channel: int) -> None:
    w, bits, factor = _weight(), torch.tensor(4), replace(WEIGHT, channel=channel)
    for _ in range(2):
        within = weight_range(factor, w, bits, SLOT) or COMPILED.weight_range(w, dim=channel)
        for _ in range(2):  # forward and backward
            rounded = round_factor(factor, w, Rounds(bits, within), SLOT)
            assert rounded is not None and torch.equal(rounded, COMPILED.weight(w, bits, dim=channel))
        w.data.mul_(2)  # no new version


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 3e38])
def test_a_bad_channel_leaves_all_of_it_to_the_long_way(bad: float) -> None:
    w = _weight()
    w[5, 1, 1], w[5, 2, 2] = bad, -1e38
    within = weight_range(WEIGHT, w, torch.tensor(4), SLOT)
    assert within is not None
    for found, wanted in zip(within[:2], COMPILED.weight_range(w, dim=0)[:2], strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert round_factor(WEIGHT, w, Rounds(torch.tensor(4), within), SLOT) is None


def test_weights_in_another_order_or_of_other_types_are_measured_by_themselves() -> None:
    w = _weight()
    assert weight_range(WEIGHT, w.mT, torch.tensor(4), SLOT) is None
    assert weight_range(WEIGHT, w.double(), torch.tensor(4), SLOT) is None
    assert weight_range(replace(WEIGHT, channel=1), w, torch.tensor(4), SLOT) is None


@pytest.mark.parametrize("fmt", [COMPILED, AffineByKernels("zero")])
@pytest.mark.parametrize("bits", [(6,), (0, 3, 4, 32, 6)])
def test_a_gradient_is_that_of_every_format(bits: tuple[int, ...], fmt: AffineFormat) -> None:
    torch.manual_seed(0)
    g, seed = torch.randn(5, 40, 8), torch.tensor(11)
    widths = torch.tensor(bits[0] if len(bits) == 1 else bits)
    found = round_gradient(fmt, g, widths, BatchAxis(), seed, SLOT, "matrices")
    assert found is not None and torch.equal(found, rounded_gradient(fmt, g, widths, BatchAxis(), seed))
    g[1, 2, 3] = torch.nan
    assert round_gradient(fmt, g, widths, BatchAxis(), seed, SLOT, "matrices") is None


def test_an_activation_that_lies_there_already_is_not_rounded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x, bits = torch.randn(4, 5, 6), torch.tensor([3, 4, 6, 3])
    within = COMPILED.activation_range(x)
    first = round_factor(ACTIVATION, x, Rounds(bits, within), SLOT)
    assert first is not None and torch.equal(first, COMPILED.activation(x, bits.view(-1, 1, 1), within))
    with monkeypatch.context() as patched:
        patched.delattr(by_kernels, "round_compiled")
        assert round_factor(ACTIVATION, x, Rounds(bits.clone(), within._replace(lo=within.lo.clone())), SLOT) is first
    other = round_factor(ACTIVATION, x, Rounds(bits + 1, within), SLOT)
    assert other is not None and torch.equal(other, COMPILED.activation(x, bits.view(-1, 1, 1) + 1, within))


def test_only_what_kernels_round_entirely_takes_it() -> None:
    assert has_all_kernels(ACTIVATION, WEIGHT, COMPILED)
    assert not has_all_kernels(ACTIVATION, WEIGHT, AffineFormat())
    assert not has_all_kernels(ACTIVATION, WEIGHT, DoReFaFormat())
