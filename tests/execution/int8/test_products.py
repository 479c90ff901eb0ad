"""Products of integer codes: the numbers of the float products, however they are padded or split."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fractrain_fx.execution.int8 import products as int8
from fractrain_fx.execution.int8.products import (
    HIGH,
    LOW,
    Codes,
    error_product,
    int_mm,
    limbs_of,
    product,
    weight_product,
)
from tests.products import FORMS, needs_kernels


def _bytes(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def _whole(a: Tensor, b: Tensor) -> Tensor:
    return a.double() @ b.double()


def _values(matrix: Codes) -> Tensor:
    scale, zero = (x.double().unsqueeze(-1) if x.ndim else x.double() for x in (matrix.scale, matrix.zero))
    return scale * matrix.codes.double() + zero


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize(
    "rows, inner, columns",
    [(1, 1, 1), (4, 1, 3), (1, 6, 1), (40, 5, 1), (3, 5, 7), (16, 8, 8), (17, 24, 9), (40, 33, 16)],
)
def test_padding_changes_nothing(rows: int, inner: int, columns: int, pad: bool) -> None:
    a, b = _bytes(rows, inner), _bytes(columns, inner).t()
    assert torch.equal(int_mm(a, b, pad=pad).double(), _whole(a, b))


def test_what_is_padded_has_the_sizes_that_cuda_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def seen(a: Tensor, b: Tensor) -> Tensor:
        sizes.append((*a.shape, b.shape[1]))
        assert a.is_contiguous() and b.is_contiguous()
        return _whole(a, b).int()

    monkeypatch.setattr(torch, "_int_mm", seen)
    int_mm(_bytes(4, 13).t(), _bytes(4, 9), pad=True)
    assert sizes == [(17, 8, 16)]


@pytest.mark.parametrize("pad", [False, True])
def test_long_sums_are_split(monkeypatch: pytest.MonkeyPatch, pad: bool) -> None:
    monkeypatch.setattr(int8, "_LONGEST", 16)
    a, b = _bytes(5, 53), _bytes(53, 6)
    assert torch.equal(int_mm(a, b, pad=pad).double(), _whole(a, b))


def test_the_longest_sum_fits_into_32_bits() -> None:
    assert int8._LONGEST * 128 * 128 < 2**31 and int8._LONGEST % 8 == 0


def test_two_bytes_hold_all_numbers_of_16_bits() -> None:
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(256, 256)
    for each in (numbers, numbers[:, :1], numbers[:1].t()):
        limbs = limbs_of(each).float()
        assert torch.equal(256 * limbs[..., HIGH] + limbs[..., LOW] + 128, each.float())


@pytest.mark.parametrize("compiled", FORMS)
@pytest.mark.parametrize("by_row", [False, True])
def test_the_forward_product(by_row: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    ends = (torch.rand(30) + 0.1, torch.randn(30)) if by_row else (torch.tensor(0.3), torch.tensor(-1.2))
    x, w = Codes(_bytes(30, 20), *ends), Codes(_bytes(12, 20), torch.rand(12) + 0.1, torch.randn(12))
    bias = torch.randn(12)
    wanted = _values(x) @ _values(w).T
    assert _error(product(x, w, compiled=compiled), wanted) < 1e-6
    assert _error(product(x, w, bias, compiled=compiled), wanted + bias) < 1e-6


@pytest.mark.parametrize("compiled", FORMS)
def test_the_error_product_rounds_each_row_in_units_of_its_own(compiled: bool) -> None:
    torch.manual_seed(0)
    w = Codes(_bytes(12, 20), torch.rand(12) + 0.1, torch.randn(12))
    g = torch.randn(30, 12) * torch.logspace(-20, 5, 30).unsqueeze(1)
    g[3] = 0
    dx, wanted = error_product(g, w, compiled=compiled), g.double() @ _values(w)
    assert not dx[3].any()
    for row in set(range(30)) - {3}:
        assert _error(dx[row], wanted[row]) < 1e-4


@needs_kernels
@pytest.mark.parametrize("wide", [False, True])
def test_the_error_product_of_codes_is_that_of_their_values(wide: bool) -> None:
    torch.manual_seed(0)
    codes = torch.randint(-(2**15), 2**15, (30, 12), dtype=torch.int16) if wide else _bytes(30, 12)
    w = Codes(_bytes(12, 20), torch.rand(12) + 0.1, torch.randn(12))
    scale, zero = torch.tensor([0.01, 0.0, 2.0]), torch.tensor([0.3, 0.0, -1.0])
    rows = Codes(codes, scale.repeat_interleave(10), zero.repeat_interleave(10))
    found = error_product(Codes(codes, scale, zero), w, compiled=True)
    assert torch.equal(found, error_product(rows, w, compiled=True)) and not found[10:20].any()
    values = codes.double() * rows.scale.unsqueeze(1) + rows.zero.unsqueeze(1)
    for row in set(range(30)) - set(range(10, 20)):
        assert _error(found[row], values[row] @ _values(w)) < 1e-4


@pytest.mark.parametrize("compiled", FORMS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_gradient_shows_in_its_row(bad: float, compiled: bool) -> None:
    w = Codes(_bytes(12, 20), torch.rand(12) + 0.1, torch.zeros(12))
    g = torch.randn(30, 12)
    g[4, 7] = bad
    dx = error_product(g, w, compiled=compiled)
    assert not dx[4].isfinite().any() and dx[[*range(4), *range(5, 30)]].isfinite().all()


@pytest.mark.parametrize("compiled", FORMS)
@pytest.mark.parametrize("wide", [False, True])
def test_the_weight_product(wide: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    codes = torch.randint(-(2**15), 2**15, (300, 12), dtype=torch.int16) if wide else _bytes(300, 12)
    g = Codes(codes, torch.tensor(0.01), torch.tensor(0.2))
    x = Codes(_bytes(300, 20), torch.tensor(0.3), torch.tensor(-1.2))
    found, sums = weight_product(g, x, compiled=compiled)
    assert _error(found, _values(g).T @ _values(x)) < 1e-6 and _error(sums, _values(g).sum(0)) < 1e-6


@needs_kernels
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("runs", [True, False])
def test_rows_with_scales_of_their_own_are_multiplied_together(runs: bool, wide: bool) -> None:
    torch.manual_seed(0)
    number = torch.arange(6).repeat_interleave(torch.tensor([3, 700, 1, 40, 40, 516]))
    number = number if runs else number[torch.randperm(1300)]
    codes = torch.randint(-(2**15), 2**15, (1300, 12), dtype=torch.int16) if wide else _bytes(1300, 12)
    g = Codes(codes, (torch.rand(6) + 0.01)[number], torch.randn(6)[number])
    x = Codes(_bytes(1300, 20), (torch.rand(6) + 0.1)[number], torch.randn(6)[number])
    found, sums = weight_product(g, x, compiled=True)
    assert _error(found, _values(g).T @ _values(x)) < 1e-6 and _error(sums, _values(g).sum(0)) < 1e-6
    without = number != 3
    found, sums = weight_product(g._replace(scale=g.scale * without), x, compiled=True)
    wanted = _values(g)[without]
    assert _error(found, wanted.T @ _values(x)[without]) < 1e-6 and _error(sums, wanted.sum(0)) < 1e-6
    assert not any(each.any() for each in weight_product(g._replace(scale=torch.tensor(0.0)), x, compiled=True))
    assert all(each.isnan().all() for each in weight_product(g._replace(scale=g.scale * torch.nan), x, compiled=True))
