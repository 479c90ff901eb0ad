"""The C++ product of whole codes: exact at every width, size and order in memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fractrain_fx.native import kernels
from tests.products import needs_kernels

pytestmark = needs_kernels

_ONE, _NONE = torch.ones(()), torch.zeros(())
# Widths of both factors, by how they are multiplied: as numbers of 16 bits, as bytes, as bytes summed up in 16 bits.
_WIDTHS = [(16, 8), (12, 4), (8, 8), (8, 7), (7, 8), (8, 6), (6, 6), (2, 8), (3, 3), (9, 2)]


def _codes(bits: int, *shape: int) -> Tensor:
    half = 1 << (bits - 1)
    return torch.randint(-half, half, shape, dtype=torch.int16 if bits > 8 else torch.int8)


def _product(a: Tensor, b: Tensor) -> Tensor:
    found: Tensor = kernels().code_product(a, _ONE, _NONE, b, _ONE, _NONE, None, None)
    return found


def _assert_exact(a: Tensor, b: Tensor) -> None:
    wanted = a.double() @ b.double()
    found = _product(a, b)
    assert found.dtype == torch.float32 and found.is_contiguous()
    # A sum has 31 bits and float32 24; long ones are added up in it. Nothing else is rounded.
    assert (found - wanted).abs().max() <= 3e-7 * wanted.abs().max()
    if wanted.abs().max() < 2**24:
        assert torch.equal(found.double(), wanted)


@pytest.mark.parametrize("widths", _WIDTHS)
@pytest.mark.parametrize(
    "rows, inner, columns",
    [(1, 1, 1), (7, 5, 3), (6, 512, 16), (101, 33, 77), (13, 1027, 40), (5, 9000, 33), (300, 66, 270)],
)
def test_every_width_and_size(rows: int, inner: int, columns: int, widths: tuple[int, int]) -> None:
    a, b = _codes(widths[0], rows, inner), _codes(widths[1], inner, columns)
    for left in (a, a.t().contiguous().t(), a.repeat(1, 2)[:, :inner]):
        for right in (b, b.t().contiguous().t()):
            _assert_exact(left, right)


@pytest.mark.parametrize("widths", _WIDTHS)
@pytest.mark.parametrize("signs", [(-1, -1), (-1, 1), (1, -1), (1, 1)])
def test_the_largest_sums_do_not_overflow(widths: tuple[int, int], signs: tuple[int, int]) -> None:
    a, b = _codes(widths[0], 8, 2100), _codes(widths[1], 2100, 17)
    for codes, bits, sign in ((a, widths[0], signs[0]), (b, widths[1], signs[1])):
        codes.fill_(-(1 << (bits - 1)) if sign < 0 else (1 << (bits - 1)) - 1)
    _assert_exact(a, b)
    a[0, 0] = 0  # otherwise all are alike, which is a width of no bits
    _assert_exact(a, b)


# Bits of both factors in samples that follow one another, each multiplied in the quickest way that they allow.
_SAMPLES = [(12, 6), (6, 4), (3, 3), (8, 8), (16, 8), (2, 7)]


@pytest.mark.parametrize("upright", [True, False])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("rows", [1, 33, 128, 1300])
def test_samples_of_several_widths_are_summed_over(rows: int, largest: bool, upright: bool) -> None:
    def codes(place: int, columns: int) -> Tensor:
        parts = [_codes(widths[place], rows, columns) for widths in _SAMPLES]
        if largest:
            for part in parts:
                part[:, 1:] = part.max() if place else part.min()
        return torch.cat([part.to(parts[0].dtype) for part in parts])

    g, x = codes(0, 37), codes(1, 21)
    if not upright:
        g, x = g.t().contiguous().t(), x.t().contiguous().t()
    scale = torch.tensor([2.0**-i for i in range(len(_SAMPLES))]).repeat_interleave(rows)
    found, sums = kernels().code_product_of_rows(g, scale, torch.zeros(len(g)), x, _ONE, _NONE)
    scaled = g.double().t() * scale
    wanted = scaled @ x.double()
    assert (found - wanted).abs().max() <= 3e-7 * wanted.abs().max()
    assert (sums - scaled.sum(1)).abs().max() <= 3e-7 * scaled.abs().sum(1).max()


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("widths", [(6, 3, 4, 2), (8, 2, 5, 1)])
def test_samples_of_several_widths_side_by_side(widths: Sequence[int], largest: bool) -> None:
    """Each row of tiles is summed up in 16 bits for as long as its own codes allow."""
    a = torch.cat([_codes(bits, 10, 1100) for bits in widths])
    b = _codes(6, 1100, 20)
    if largest:
        for sign, codes in ((-1, a), (1, b)):
            codes[:, 1:] = codes.max() if sign > 0 else codes.amin(1, keepdim=True)
    _assert_exact(a, b)
    _assert_exact(a.flip(0), b)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_however_many_threads(threads: int) -> None:
    """Few outputs with long sums are shared out by parts of the sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows, inner, columns in ((20, 50_000, 20), (400, 300, 500)):
            _assert_exact(_codes(8, rows, inner), _codes(8, inner, columns))
    finally:
        torch.set_num_threads(before)


def test_memory_is_used_again_for_other_sizes() -> None:
    """And not for the largest one, whose numbers take more than is kept."""
    for rows, inner, columns in ((1100, 9000, 17), (7, 5, 3), (300, 66, 270), (1100, 9000, 17), (13, 1027, 40)):
        _assert_exact(_codes(12, rows, inner), _codes(6, inner, columns))


@pytest.mark.parametrize("each", [False, True])
def test_scales_zeros_and_what_is_added(each: bool) -> None:
    torch.manual_seed(0)
    a, b = _codes(8, 30, 700), _codes(6, 700, 20)
    of_a, of_b = ((30,), (20,)) if each else ((), ())
    ends = torch.rand(of_a) + 0.1, torch.randn(of_a), torch.rand(of_b) + 0.1, torch.randn(of_b)
    rows, columns = torch.randn(30), torch.randn(20)
    first = (a.double().t() * ends[0] + ends[1]).t()
    second = b * ends[2].double() + ends[3]
    wanted = first @ second + rows.unsqueeze(1) + columns
    found = kernels().code_product(a, *ends[:2], b, *ends[2:], rows, columns)
    assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max()


@pytest.mark.parametrize(
    "a, b",
    [
        (_codes(8, 3, 4), _codes(8, 5, 6)),
        (_codes(8, 3, 4).float(), _codes(8, 4, 6)),
        (_codes(8, 3, 4), _codes(9, 4, 6)),
        (_codes(8, 0, 4), _codes(8, 4, 6)),
        (_codes(8, 3), _codes(8, 3, 6)),
    ],
)
def test_what_is_no_product_of_codes_is_an_error(a: Tensor, b: Tensor) -> None:
    with pytest.raises(RuntimeError, match="matrices of codes"):
        _product(a, b)


def test_numbers_may_be_those_of_runs_of_rows() -> None:
    torch.manual_seed(0)
    a, b, ends = _codes(8, 12, 30), _codes(8, 30, 5), torch.rand(2, 3)
    found = kernels().code_product(a, *ends, b, _ONE, _NONE, None, None)
    assert torch.equal(found, kernels().code_product(a, *ends.repeat_interleave(4, 1), b, _ONE, _NONE, None, None))
    g, x, of_x = _codes(12, 12, 7), _codes(8, 12, 5), torch.rand(2, 6)
    found = kernels().code_product_of_rows(g, *ends, x, *of_x)
    each = kernels().code_product_of_rows(g, *ends.repeat_interleave(4, 1), x, *of_x.repeat_interleave(2, 1))
    assert all(map(torch.equal, found, each))


def test_a_scale_for_other_rows_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="one number, or one for each run"):
        kernels().code_product(_codes(8, 3, 4), torch.ones(4), _NONE, _codes(8, 4, 6), _ONE, _NONE, None, None)
