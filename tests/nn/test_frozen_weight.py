"""A weight kept as codes has the values that format affine gave the float weight, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx.errors import ModelError
from fractrain_fx.formats import AffineFormat
from fractrain_fx.kernels.formats import AffineByKernels
from fractrain_fx.nn.frozen_weight import FrozenWeight
from tests.models import marks

SHAPES: list[tuple[tuple[int, ...], int | None]] = [
    ((8, 6), 0),
    ((8, 7), 0),
    ((6, 8), 1),
    ((1, 9), 0),
    ((5,), None),
    ((4, 3, 3, 3), 0),
]


def weight(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) - 0.3
    w.view(-1)[0] = 0
    return w.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize("bits", [pytest.param(bits, marks=marks(bits, (3, 5, 6, 7), ())) for bits in range(1, 9)])
def test_values_are_those_of_the_format(bits: int, shape: tuple[int, ...], dim: int | None, dtype: torch.dtype) -> None:
    fmt, w = AffineFormat(), weight(shape, dtype)
    frozen = FrozenWeight(w, bits, fmt, dim, "w")
    rounded = fmt.weight(w, bits, dim=dim)
    assert torch.equal(frozen.values(), rounded) and frozen.values().dtype == dtype and frozen.shape == w.shape
    room = torch.empty(shape, dtype=frozen.lo.dtype)
    assert torch.equal(frozen.values(out=room), rounded)
    assert copy.deepcopy(frozen).values().equal(rounded)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_values_of_a_constant_and_of_huge_weights(bits: int) -> None:
    fmt = AffineFormat()
    for w in (torch.full((3, 4), 0.7), torch.tensor([[-3e38, 3e38, 0.0, 1.0]]), torch.zeros(2, 2)):
        assert torch.equal(FrozenWeight(w, bits, fmt, 0, "w").values(), fmt.weight(w, bits, dim=0))


def test_kernels_round_to_the_same_values() -> None:
    fmt, w = AffineByKernels(), weight((40, 24))
    assert torch.equal(FrozenWeight(w, 4, fmt, 0, "w").values(), fmt.weight(w, torch.tensor(4), dim=0))


def test_four_bits_take_half_a_byte_and_a_range_a_channel() -> None:
    frozen = FrozenWeight(torch.randn(64, 256), 4, AffineFormat(), 0, "w")
    assert frozen.codes.nbytes == 64 * 256 // 2
    assert sum(x.nbytes for x in frozen.state_dict().values()) == 64 * 256 // 2 + 64 * 8 + 4


def test_rounding_the_values_again_is_not_the_identity_so_the_range_is_kept() -> None:
    fmt = AffineFormat()
    values = FrozenWeight(torch.randn(256, 64, generator=torch.Generator().manual_seed(0)), 4, fmt, 0, "w").values()
    again = fmt.weight(values, 4, dim=0)
    assert not torch.equal(again, values)
    assert torch.allclose(again, values, rtol=0, atol=1e-5)  # but it moves no value to another level


def test_a_cast_changes_the_type_of_the_values_and_not_the_ranges() -> None:
    fmt, w = AffineFormat(), weight((8, 6))
    frozen = FrozenWeight(w, 4, fmt, 0, "w").to(torch.bfloat16)
    assert (frozen.codes.dtype, frozen.lo.dtype, frozen.dtype) == (torch.uint8, torch.float32, torch.bfloat16)
    assert torch.equal(frozen.values(), fmt.weight(w, 4, dim=0).to(torch.bfloat16))


def test_code_of_the_original_reads_values_and_cannot_write() -> None:
    fmt, layer, x = AffineFormat(), nn.Linear(6, 8), torch.randn(3, 6)
    frozen = FrozenWeight(layer.weight, 4, fmt, 0, "layer.weight")
    expected = nn.functional.linear(x, fmt.weight(layer.weight.detach(), 4, dim=0), layer.bias)
    layer._parameters["weight"] = None
    layer.__dict__["weight"] = frozen
    assert torch.equal(layer(x), expected)
    with pytest.raises(ModelError, match=r"layer.weight is kept as codes.*model.restore\(\)"):
        layer.weight.data += 1
