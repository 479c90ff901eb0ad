"""How gates start: embeddings by ``nn.Linear``'s rule or by He's."""

from __future__ import annotations

import math

import pytest
import torch

from fractrain_fx import GateConfig
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.nn.gates import BlockEmbedding
from tests.build import rewritten
from tests.residual import Residual


def test_he_draws_weights_by_the_fan_out() -> None:
    torch.manual_seed(0)
    embedding = BlockEmbedding(64, 1, BatchAxis(), (256, 512), "he")
    # A deviation of n values is good to 1 / sqrt(2 n): 0.6 % and 0.2 % here.
    assert float(embedding.hidden.weight.detach().std()) == pytest.approx(math.sqrt(2 / 256), rel=0.03)
    assert float(embedding.output.weight.detach().std()) == pytest.approx(math.sqrt(2 / 512), rel=0.03)
    plain = BlockEmbedding(64, 1, BatchAxis(), (256, 512), "linear")
    assert float(plain.hidden.weight.detach().std()) == pytest.approx(1 / math.sqrt(3 * 64), rel=0.03)


def test_embeddings_differ_more_between_samples_after_he() -> None:
    def spread(gate: GateConfig) -> float:
        torch.manual_seed(0)
        model = rewritten(Residual(), torch.randn(2, 6), gate=gate)
        embeddings = [module for module in model.modules() if isinstance(module, BlockEmbedding)]
        return float(embeddings[0](torch.randn(64, 8)).std(0).mean().detach())

    assert spread(GateConfig(init="he")) > 1.5 * spread(GateConfig(init="linear"))
