"""Layers that are dropped at random are in the graph, with the random choice beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from fractrain_fx.capture import record


def wav2vec2(rate: float) -> tuple[nn.Module, dict[str, Any]]:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    waves: dict[str, Any] = {
        "conv_dim": (8, 8),
        "conv_stride": (5, 2),
        "conv_kernel": (10, 3),
        "num_feat_extract_layers": 2,
    }
    places: dict[str, Any] = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0}
    dropouts: dict[str, Any] = {f"{name}_dropout": 0.0 for name in ("hidden", "attention", "activation", "feat_proj")}
    config = transformers.Wav2Vec2Config(**sizes, **waves, **places, **dropouts, layerdrop=rate)
    return transformers.Wav2Vec2Model(config), {"input_values": torch.randn(2, 400)}


def bart(rate: float) -> tuple[nn.Module, dict[str, Any]]:
    sizes: dict[str, Any] = {"d_model": 16, "vocab_size": 40, "max_position_embeddings": 32, "dropout": 0.0}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 32, f"{side}_layerdrop": rate}
    ids = torch.randint(4, 40, (2, 8))
    return transformers.BartModel(transformers.BartConfig(**sizes)), {"input_ids": ids, "decoder_input_ids": ids[:, :6]}


@pytest.mark.parametrize("make", [wav2vec2, bart])
def test_a_layer_is_dropped_as_often_as_in_the_model(make: Any) -> None:
    model, kwargs = make(1.0)
    before = dict(model.config.to_dict())
    recording = record(model, (), kwargs)
    assert not recording.leaves and recording.checked and recording.python.notes
    assert model.config.to_dict() == before and not any("forward" in vars(module) for module in model.modules())
    values = recording.call.bind((), kwargs)
    model.train()
    # At a rate of 1 nothing is left to chance: no layer counts.
    assert torch.equal(recording.train(*values).last_hidden_state, model(**kwargs).last_hidden_state)
    model.eval()
    assert torch.equal(recording.eval(*values).last_hidden_state, model(**kwargs).last_hidden_state)


def test_each_layer_is_dropped_on_its_own() -> None:
    model, kwargs = wav2vec2(0.5)
    recording = record(model, (), kwargs)
    values = recording.call.bind((), kwargs)
    torch.manual_seed(0)
    seen = {round(float(recording.train(*values).last_hidden_state.detach().abs().sum()), 2) for _ in range(30)}
    assert len(seen) == 4  # none, the first, the second, both
