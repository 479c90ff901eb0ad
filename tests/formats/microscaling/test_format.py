"""Bits as data: the block formats on CUDA, in compiled graphs, with widths that they lack; blocks of integers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fractrain_fx.config import RECIPES
from fractrain_fx.errors import InputError
from fractrain_fx.formats import Operand, get_format
from fractrain_fx.formats.microscaling import fake_quantize
from fractrain_fx.formats.microscaling.hadamard import rotation

WIDTHS = {"mx": (4, 6, 8), "nvfp4": (4,), "fp8": (8,), "int": (4, 6, 8)}


@pytest.mark.parametrize("name", WIDTHS)
class TestEveryFormat:
    def test_wide_and_missing_widths(self, name: str) -> None:
        fmt, x, of = get_format(name), torch.randn(3, 40), Operand("forward", "x", (1,))
        x[0, 0], x[0, 1] = 3.4e38, 1e-40  # bfloat16's own cast gives infinity for the first
        found = fmt.operand(x, 16, of)
        assert torch.equal(found[1:], x[1:].bfloat16().float()) and found.isfinite().all()
        assert found[0, 1] == x[0, 1].bfloat16() and fmt.operand(x, 32, of) is x and fmt.operand(x, 0, of) is x
        with pytest.raises(InputError, match=f"bits=5 is not a width of format '{name}'"):
            fmt.operand(x, 5, of)

    def test_takes_bits_of_samples_on_cuda(self, name: str) -> None:
        fmt = get_format(name)
        with FakeTensorMode(allow_non_fake_inputs=True):
            x, bits, seed = torch.empty(4, 40, device="cuda"), torch.empty(4, 1, device="cuda").int(), torch.tensor(1)
            for of in (Operand("forward", "x", (1,)), Operand("input_gradient", "g", (0,))):
                for each in (bits, bits[0, 0]):
                    assert fmt.operand(x, each, of, seed=seed).device.type == "cuda"
            pair = fmt.transform("weight_gradient", x, x, (0, 0), (bits[0, 0], bits[0, 0]), seed)
            assert {each.device.type for each in pair} == {"cuda"}

    @pytest.mark.long
    def test_one_compiled_graph_serves_all_widths_with_the_same_values(self, name: str) -> None:
        fmt, x = get_format(name, recipe=RECIPES.get(name)), torch.randn(20, 40)  # the last blocks are shorter
        of = Operand("forward", "w", (1,), across=(0,), weight=True)
        compiled = torch.compile(lambda bits: fmt.operand(x, bits, of), fullgraph=True)
        for width in (*WIDTHS[name], 16, 32):
            assert torch.equal(compiled(torch.tensor(width)), fmt.operand(x, width, of))


def test_elements_of_six_bits_have_more_exponent_for_gradients() -> None:
    fmt, x = get_format("mx"), torch.randn(3, 40)
    assert torch.equal(fmt.operand(x, 6, Operand("forward", "x", (1,))), fake_quantize(x, "e2m3"))
    assert torch.equal(fmt.operand(x, 6, Operand("input_gradient", "w", (0,))), fake_quantize(x, "e2m3", axis=0))
    assert torch.equal(fmt.operand(x, 6, Operand("input_gradient", "g", (1,))), fake_quantize(x, "e3m2"))


def int8(x: Tensor, largest: Tensor) -> Tensor:
    """Symmetric 8-bit rounding as its formula says."""
    scale = largest / 127
    return (x / scale).round() * scale


def test_jetfire_rounds_blocks_of_32_by_32_once_for_both_products() -> None:
    fmt, x, seed = get_format("int"), torch.randn(40, 70), torch.tensor(3)
    assert fmt.recipe is RECIPES["jetfire"]
    forward = Operand("forward", "x", (1,), across=(0,))
    found = fmt.operand(x, 8, forward)
    for rows in (slice(0, 32), slice(32, 40)):
        for columns in (slice(0, 32), slice(32, 64), slice(64, 70)):
            block = x[rows, columns]
            assert torch.allclose(found[rows, columns], int8(block, block.abs().max()), rtol=1e-6, atol=0)
    assert torch.equal(found, fmt.operand(x, 8, Operand("weight_gradient", "x", (0,), across=(1,))))
    pair = (Operand("input_gradient", "g", (1,), across=(0,)), Operand("weight_gradient", "g", (0,), across=(1,)))
    first, second = (fmt.operand(x, 8, of, seed=seed) for of in pair)
    assert torch.equal(first, second) and not torch.equal(first, found)  # by chance, and once


def test_switchback_has_rows_and_leaves_the_weight_gradient_in_bfloat16() -> None:
    fmt, x = get_format("int", recipe=RECIPES["switchback"]), torch.randn(5, 40)
    rows = int8(x, x.abs().amax(1, keepdim=True))
    assert torch.allclose(fmt.operand(x, 8, Operand("forward", "x", (1,))), rows, rtol=1e-6, atol=0)
    assert torch.allclose(fmt.operand(x, 8, Operand("input_gradient", "g", (1,))), rows, rtol=1e-6, atol=0)
    whole = fmt.operand(x, 8, Operand("forward", "w", (1,), channel=0, weight=True))
    assert torch.allclose(whole, int8(x, x.abs().max()), rtol=1e-6, atol=0)
    for tensor in ("g", "x"):
        of = Operand("weight_gradient", tensor, (0,))
        assert torch.equal(fmt.operand(x, 8, of), x.bfloat16().float())
        assert fmt.operand(x, 32, of) is x and fmt.operand(x, 0, of) is x
    samples = torch.tensor([0, 8, 32, 8, 0]).view(5, 1)
    kept = fmt.operand(x, samples, Operand("weight_gradient", "g", (0,)))
    assert torch.equal(kept, torch.where(samples == 8, x.bfloat16().float(), x))


def test_the_matrix_of_the_transform_is_made_once_and_what_a_mode_of_torch_makes_stays_there() -> None:
    like, wide = torch.ones(1), torch.ones(1, dtype=torch.float64)
    assert rotation(16, None, like) is rotation(16, None, like)
    with FakeTensorMode() as mode:
        assert isinstance(rotation(16, None, mode.from_tensor(like)), FakeTensor)
    with torch.inference_mode():
        assert rotation(64, None, wide).is_inference()
    assert not rotation(64, None, wide).is_inference()
