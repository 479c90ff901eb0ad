"""Products of integer codes by C++ kernels: the numbers of the float products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fractrain_fx.execution.codes.layout import Codes, Convolved, Features
from fractrain_fx.formats.batch_axis import BatchAxis
from tests.products import needs_kernels

pytestmark = needs_kernels
FEATURES = Features()


def _bytes(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def _values(matrix: Codes) -> Tensor:
    scale, zero = (x.double().unsqueeze(-1) if x.ndim else x.double() for x in (matrix.scale, matrix.zero))
    return scale * matrix.codes.double() + zero


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("by_row", [False, True])
def test_the_forward_product(by_row: bool) -> None:
    ends = (torch.rand(30) + 0.1, torch.randn(30)) if by_row else (torch.tensor(0.3), torch.tensor(-1.2))
    x, w = Codes(_bytes(30, 20), *ends), Codes(_bytes(12, 20), torch.rand(12) + 0.1, torch.randn(12))
    bias = torch.randn(12)
    wanted = _values(x) @ _values(w).T
    assert _error(FEATURES.output(x, w, None), wanted) < 1e-6
    assert _error(FEATURES.output(x, w, bias), wanted + bias) < 1e-6


def test_the_error_product_rounds_each_row_in_units_of_its_own() -> None:
    w = Codes(_bytes(12, 20), torch.rand(12) + 0.1, torch.randn(12))
    g = torch.randn(30, 12) * torch.logspace(-20, 5, 30).unsqueeze(1)
    g[3] = 0
    dx, wanted = FEATURES.errors(g, w, (30, 20)), g.double() @ _values(w)
    assert not dx[3].any()
    for row in set(range(30)) - {3}:
        assert _error(dx[row], wanted[row]) < 1e-4


@pytest.mark.parametrize("wide", [False, True])
def test_the_error_product_of_codes_is_that_of_their_values(wide: bool) -> None:
    codes = torch.randint(-(2**15), 2**15, (30, 12), dtype=torch.int16) if wide else _bytes(30, 12)
    w = Codes(_bytes(12, 20), torch.rand(12) + 0.1, torch.randn(12))
    scale, zero = torch.tensor([0.01, 0.0, 2.0]), torch.tensor([0.3, 0.0, -1.0])
    rows = Codes(codes, scale.repeat_interleave(10), zero.repeat_interleave(10))
    found = FEATURES.errors(Codes(codes, scale, zero), w, (30, 20))
    assert torch.equal(found, FEATURES.errors(rows, w, (30, 20))) and not found[10:20].any()
    values = codes.double() * rows.scale.unsqueeze(1) + rows.zero.unsqueeze(1)
    for row in set(range(30)) - set(range(10, 20)):
        assert _error(found[row], values[row] @ _values(w)) < 1e-4


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_gradient_shows_in_its_row(bad: float) -> None:
    w = Codes(_bytes(12, 20), torch.rand(12) + 0.1, torch.zeros(12))
    g = torch.randn(30, 12)
    g[4, 7] = bad
    dx = FEATURES.errors(g, w, (30, 20))
    assert not dx[4].isfinite().any() and dx[[*range(4), *range(5, 30)]].isfinite().all()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("runs", [True, False])
def test_rows_with_scales_of_their_own_are_multiplied_together(runs: bool, wide: bool) -> None:
    number = torch.arange(6).repeat_interleave(torch.tensor([3, 700, 1, 40, 40, 516]))
    number = number if runs else number[torch.randperm(1300)]
    codes = torch.randint(-(2**15), 2**15, (1300, 12), dtype=torch.int16) if wide else _bytes(1300, 12)
    g = Codes(codes, (torch.rand(6) + 0.01)[number], torch.randn(6)[number])
    x, w = Codes(_bytes(1300, 20), (torch.rand(6) + 0.1)[number], torch.randn(6)[number]), torch.empty(12, 20)
    found, sums = FEATURES.weight(g, x, w)
    assert _error(found, _values(g).T @ _values(x)) < 1e-6 and _error(sums, _values(g).sum(0)) < 1e-6
    without = number != 3
    found, sums = FEATURES.weight(g._replace(scale=g.scale * without), x, w)
    wanted = _values(g)[without]
    assert _error(found, wanted.T @ _values(x)[without]) < 1e-6 and _error(sums, wanted.sum(0)) < 1e-6
    assert not any(each.any() for each in FEATURES.weight(g._replace(scale=torch.tensor(0.0)), x, w))
    assert all(each.isnan().all() for each in FEATURES.weight(g._replace(scale=g.scale * torch.nan), x, w))


def test_shapes_that_are_not_rows_of_samples_are_told() -> None:
    convolved = Convolved((3, 3), (1, 1), (1, 1), (1, 1))
    assert convolved.refuses((32, 64, 14, 14), (64, 64, 3, 3), [BatchAxis()]) is None
    assert "as rows of samples" in str(convolved.refuses((4, 4, 4, 4), (4, 4, 3, 3), [BatchAxis(1)]))
    assert "as rows of samples" in str(convolved.refuses((4, 6, 6), (4, 4, 3, 3), [])), "one image, not a batch of them"
    assert "more than 131,072 values" in str(convolved.refuses((2, 20000, 8, 8), (4, 20000, 3, 3), []))
