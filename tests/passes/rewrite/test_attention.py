"""Fused attention is opened into two products that get precisions, or stays one float call where that is asked for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fractrain_fx import Engine, FracConfig, FracModel, fractrainify
from fractrain_fx.errors import ConfigError, ModelError
from fractrain_fx.zoo.models.transformer import TransformerLM
from tests import build

ATTENTION = "scaled_dot_product_attention"


def rewritten(attention: str, method: str = "pfq") -> tuple[FracModel, torch.Tensor]:
    model = TransformerLM(50, width=32, hidden=64, layers=2, heads=4, dropout=0.0)
    tokens = torch.randint(50, (3, 8))
    return build.rewritten(model, tokens, method=method, attention=attention), tokens


def test_opened_attention_has_two_products_of_the_stages_precision() -> None:
    model, _ = rewritten("quantized")
    kinds = [op.kind for op in model.ops]
    assert ATTENTION not in kinds and kinds.count("matmul") == 4
    assert all(op.precision.mode == "scheduled" for op in model.ops if op.kind == "matmul")


@pytest.mark.parametrize("method", ["pfq", "dfq"])
def test_kept_attention_is_float_and_costs_what_float_costs(method: str) -> None:
    model, tokens = rewritten("float", method)
    kept = [op for op in model.ops if op.kind == ATTENTION]
    assert len(kept) == 2 and {op.precision.mode for op in kept} == {"float"}
    assert {op.kind for op in model.ops if op.precision.mode in ("scheduled", "gated")} == {"linear"}
    engine = Engine(model)
    engine.loss(model(tokens).square().mean()).backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    opened, _ = rewritten("quantized", method)
    opened(tokens)
    assert opened.macs == model.macs
    if method == "pfq":
        assert model.cost.cp_total > opened.cost.cp_total and model.cost.cp == opened.cost.cp


def test_what_would_change_nothing_is_an_error() -> None:
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    with pytest.raises(ModelError, match="calls no scaled_dot_product_attention"):
        fractrainify(
            plain, config=FracConfig(method="pfq", attention="float"), example_inputs=(torch.randn(2, 4),), check=False
        )
    with pytest.raises(ConfigError, match="quantized, float"):
        FracConfig(attention="fused")  # type: ignore[arg-type]
