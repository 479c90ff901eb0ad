"""Which operand of a contraction is rounded as what."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fractrain_fx import FracConfig, fractrainify
from fractrain_fx.nn.quantizers import ActivationQuantizer, MixedActivationQuantizer, WeightQuantizer


@pytest.mark.parametrize("method", ["pfq", "fractrain"])
def test_what_a_contraction_reads_from_another_one_directly_is_an_activation(method: str) -> None:
    four = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model = fractrainify(four, config=FracConfig(method=method), example_inputs=(torch.randn(2, 4),), check=False)  # type: ignore[arg-type]
    for layer in ("1", "2"):
        quantizers = model.get_submodule(f"frac.quant.{layer}")
        assert isinstance(quantizers.input, ActivationQuantizer | MixedActivationQuantizer)
        assert isinstance(quantizers.weight, WeightQuantizer)
    called = [str(node.target) for node in model.graph.nodes if node.op == "call_module"]
    assert sum(name.endswith(".weight") for name in called) == 2
