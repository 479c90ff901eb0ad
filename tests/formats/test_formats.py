"""What ``get_format`` finds, and what every format promises."""

from __future__ import annotations

import copy

import pytest
import torch

from fractrain_fx.errors import ConfigError
from fractrain_fx.formats import Format, ValueRange, get_format
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.kernels.formats import AffineByKernels

FORMATS = {name: get_format(name) for name in ("affine", "dorefa", "wageubn")}
FORMATS["affine, by kernels"] = AffineByKernels()
FORMATS["mx"] = get_format("mx")


def test_an_unknown_name_is_answered_with_near_ones() -> None:
    with pytest.raises(ConfigError, match=r"'afine' is unknown: write one of affine.* Did you mean 'affine'"):
        get_format("afine")


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
class TestEveryFormat:
    def test_is_found_by_its_name_and_copies(self, fmt: Format) -> None:
        assert isinstance(fmt, type(get_format(fmt.name))) and copy.deepcopy(fmt).name == fmt.name

    def test_keeps_shape_and_type(self, fmt: Format) -> None:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            x = torch.randn(4, 3, 5, dtype=dtype)
            lo, span, _ = fmt.activation_range(x)
            assert lo.shape == span.shape == () and lo.dtype == span.dtype == torch.float32
            rounded = (
                fmt.activation(x, 4, ValueRange(lo, span)),
                fmt.weight(x, 4, dim=1),
                fmt.gradient(x, 4, axis=BatchAxis()),
            )
            for y in rounded:
                assert y.shape == x.shape and y.dtype == dtype and y.isfinite().all() and not torch.equal(y, x)

    @pytest.mark.parametrize("bits", [0, 32])
    def test_leaves_values_of_no_or_float_bits_alone(self, fmt: Format, bits: int) -> None:
        x = torch.randn(4, 3)
        lo, span, _ = fmt.activation_range(x)
        for given in (bits, torch.tensor(bits), torch.full((4, 1), bits)):
            assert torch.equal(fmt.activation(x, given, ValueRange(lo, span)), x)
            assert torch.equal(fmt.weight(x, given, dim=0), x)
            assert torch.equal(fmt.gradient(x, given, axis=BatchAxis()), x)

    def test_makes_no_nan_of_finite_values(self, fmt: Format) -> None:
        for x in (torch.zeros(3, 2), torch.empty(0, 2), torch.full((3, 2), 3e38), torch.full((3, 2), 1e-42)):
            for y in (fmt.weight(x, 4, dim=0), fmt.gradient(x, 4, axis=BatchAxis())):
                assert y.isfinite().all()
            lo, span, _ = fmt.activation_range(x)
            assert fmt.activation(x, 4, ValueRange(lo, span)).isfinite().all()

    def test_gives_each_sample_its_own_bits(self, fmt: Format) -> None:
        g = torch.randn(4, 6)
        bits = torch.tensor([0, 4, 32, 6]).view(4, 1)
        rounded = fmt.gradient(g, bits, axis=BatchAxis())
        assert torch.equal(rounded[0], g[0]) and torch.equal(rounded[2], g[2])
        assert not torch.equal(rounded[1], g[1]) and not torch.equal(rounded[3], g[3])
