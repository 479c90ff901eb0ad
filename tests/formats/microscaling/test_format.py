"""Bits as data: formats ``mx``, ``nvfp4`` and ``fp8`` on CUDA, in compiled graphs, and with widths that they lack."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fractrain_fx.config import RECIPES
from fractrain_fx.errors import InputError
from fractrain_fx.formats import Operand, get_format
from fractrain_fx.formats.microscaling import fake_quantize

WIDTHS = {"mx": (4, 6, 8), "nvfp4": (4,), "fp8": (8,)}


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
