"""Convolutions at stride 1 as products of matrices: rows, what lies around an image, and the way back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fractrain_fx.execution.int8.layout import Patches
from fractrain_fx.execution.int8.products import Codes
from fractrain_fx.execution.int8.windows import Windows, window_errors
from fractrain_fx.nn.batch_axis import BatchAxis

_CASES = {
    "1 dimension": (Windows((4,), (1,)), (7,)),
    "2 dimensions": (Windows((3, 2), (2, 0)), (5, 6)),
    "a kernel along one side": (Windows((1, 2), (0, 1)), (3, 2)),
    "3 dimensions": (Windows((2, 3, 1), (1, 1, 0)), (3, 4, 2)),
    "a kernel wider than the image": (Windows((5, 3), (4, 2)), (2, 1)),
}
_CONVOLVE = (F.conv1d, F.conv2d, F.conv3d)


def _convolved(layout: Windows, x: Tensor, w: Tensor) -> Tensor:
    return _CONVOLVE[len(layout.kernel) - 1](x, w, padding=layout.padding)


@pytest.mark.parametrize("name", _CASES)
@pytest.mark.parametrize("last", [False, True])
def test_rows_times_the_weight_are_the_convolution(name: str, last: bool) -> None:
    layout, sizes = _CASES[name]
    x, w = torch.randn(2, 3, *sizes), torch.randn(4, 3, *layout.kernel)
    if last:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    wanted = _convolved(layout, x, w)
    found = layout.output(layout.rows(x) @ layout.columns(w).t(), x)
    torch.testing.assert_close(found, wanted)
    assert torch.equal(layout.output(layout.output_rows(wanted), x), wanted)
    of_rows = layout.weight(layout.columns(w), w)
    assert torch.equal(of_rows, w) and of_rows.stride() == w.stride()


@pytest.mark.parametrize("name", _CASES)
@pytest.mark.parametrize("bits", [5, [2, 8, 0]])
def test_around_codes_lies_the_lowest_of_their_sample(name: str, bits: int | list[int]) -> None:
    layout, sizes = _CASES[name]
    codes = torch.randint(-2, 2, (3, 5, *sizes), dtype=torch.int8)
    widths = torch.tensor(bits) if isinstance(bits, int) else torch.tensor(bits).view(3, *[1] * (codes.ndim - 1))
    lowest = torch.where(widths > 0, -(2.0 ** (widths - 1)), -1.0)
    pads = [each for pad in reversed(layout.padding) for each in (pad, pad)]
    around = F.pad(codes.double() - lowest, pads) + lowest
    wanted = Windows(layout.kernel, (0,) * len(sizes)).rows(around)
    assert torch.equal(layout.code_rows(codes, widths).double(), wanted)


@pytest.mark.parametrize("name", _CASES)
def test_what_goes_back_is_the_gradient_of_the_convolution(name: str) -> None:
    layout, sizes = _CASES[name]
    x = torch.randn(3, 6, *sizes, dtype=torch.float64, requires_grad=True)
    codes, scale, zero = torch.randint(-8, 8, (5, 6, *layout.kernel), dtype=torch.int8), torch.rand(5), torch.randn(5)
    across = (5, *[1] * (codes.ndim - 1))
    y = _convolved(layout, x, (codes * scale.view(across) + zero.view(across)).double())
    g = torch.randn(y.numel() // 5, 5)
    wanted = torch.autograd.grad(y, x, layout.output(g.double(), x))[0]
    w = Codes(layout.columns(codes), scale, zero)
    found = layout.activation(window_errors(g, w, layout, y.shape), y)
    assert found.shape == x.shape and (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def test_shapes_that_do_not_pay_are_told() -> None:
    layout = Windows((3, 3), (1, 1))
    assert layout.misfit((32, 64, 14, 14), (64, 64, 3, 3), [BatchAxis()]) is None
    assert "more than 67,108,864 values" in str(layout.misfit((32, 64, 112, 112), (64, 64, 3, 3), []))
    assert "as two matrices" in str(layout.misfit((4, 4, 4, 4), (4, 4, 3, 3), [BatchAxis(1)]))
    for each in (layout, Patches((3, 3))):
        assert "as two matrices" in str(each.misfit((4, 6, 6), (4, 4, 3, 3), [])), "one image, not a batch of them"
