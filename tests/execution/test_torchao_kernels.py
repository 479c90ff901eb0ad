"""Which of torchao's kernels computes a product: by recipe, by bits, by device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fractrain_fx.config import RECIPES, OperandRecipe, Precision, ProductRecipe, Recipe
from fractrain_fx.config.products import PRODUCTS
from fractrain_fx.execution import torchao_kernels
from fractrain_fx.execution.torchao_kernels import Kernel, kernel_of, refusal, slow

_CPU, _GPU = torch.device("cpu"), torch.device("cuda")
_NO_MX = "a CPU has no units for MX blocks"


def _kernels(recipe: str | Recipe, bits: str, dtype: torch.dtype = torch.float32) -> list[Kernel | str]:
    how = RECIPES[recipe] if isinstance(recipe, str) else recipe
    return [kernel_of(how, each, Precision.parse(bits), _CPU, dtype) for each in PRODUCTS]


def test_a_recipe_names_the_kernel_of_each_product() -> None:
    assert _kernels("mxfp8", "8/8") == [Kernel("mxfp8", "e4m3", "e4m3", _NO_MX)] * 3
    assert _kernels("fp8", "8/8") == [Kernel("float8", first, "e4m3") for first in ("e4m3", "e5m2", "e5m2")]
    assert _kernels("int8", "8/8") == [Kernel("int8", "row", "row")] * 3
    forward, input_gradient, weight_gradient = _kernels("switchback", "8/8")
    assert forward == input_gradient == Kernel("int8", "row", "tensor") and "bfloat16" in weight_gradient
    assert str(forward) == "torchao int8"
    assert str(_kernels("mxfp8", "8/8")[0]) == f"torchao MXFP8 emulated ({_NO_MX})"


def test_the_bits_of_a_stage_choose_among_products() -> None:
    by_product = Recipe("mx", by_product=True)
    for bits, own in (("8/4", [True, False, False]), ("4/8", [False, True, True]), ("16/8", [False, True, True])):
        assert [isinstance(each, Kernel) for each in _kernels(by_product, bits)] == own
    # Without by_product the activation and the weight of gradient products have the forward bits.
    assert _kernels("mxfp8", "8/4")[1] == _kernels("mxfp8", "8/4")[2] == "multiplies 4 bits by 8, and torchao 8 by 8"
    assert _kernels("mxfp8", "16/16") == ["torch multiplies bfloat16 to float32 on GPUs only"] * 3
    assert _kernels("mxfp8", "32/32")[0] == "multiplies 32 bits by 32, and torchao 8 by 8"


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("mxfp4", "rounds by chance"),
        ("jetfire", "rounds by chance"),
        (Recipe("mx", input_gradient=ProductRecipe(second=OperandRecipe(square=True))), "square blocks"),
        (Recipe("fp8", input_gradient=ProductRecipe(OperandRecipe(per_row=True))), "a scale for each row"),
        (Recipe("mx", input_gradient=ProductRecipe(OperandRecipe(eight="e5m2"))), "e5m2"),
        (Recipe("nvfp4"), "trains in formats mx, fp8 and int"),
    ],
)
def test_what_torchao_lacks_has_a_reason(recipe: Any, reason: str) -> None:
    assert reason in str(_kernels(recipe, "8/8")[1])
    assert "computes in torch.float64" in str(_kernels("fp8", "8/8", torch.float64)[0])
    assert (
        kernel_of(None, "forward", Precision(8, 8), _CPU, torch.float32) == "torchao trains in formats mx, fp8 and int"
    )


def test_a_gpu_is_asked_for_its_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    for capability, found in (((8, 0), ()), ((9, 0), ("float8",)), ((10, 0), ("float8", "mxfp8"))):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, each=capability: each)
        assert tuple(kind for kind in ("float8", "mxfp8") if refusal(kind, _GPU) is None) == found
        kernel = kernel_of(RECIPES["mxfp8"], "forward", Precision(8, 8), _GPU, torch.bfloat16)
        assert isinstance(kernel, Kernel) and (kernel.emulated is None) == ("mxfp8" in found)
    for triton in (True, False):
        monkeypatch.setattr(torchao_kernels, "has_triton", lambda triton=triton: triton)
        assert (refusal("int8", _CPU) is not None) == triton
        assert (refusal("int8", _GPU) is None) == triton
    assert refusal("bfloat16", _GPU) is None and refusal("float8", torch.device("meta")) is None
    assert "device of type mps" in str(refusal("int8", torch.device("mps")))


def test_where_it_saves_no_time_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    assert "VNNI" in str(slow("int8", _CPU)) and "in other types" in str(slow("float8", _CPU))
    assert slow("float8", _GPU) is None
