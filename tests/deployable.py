"""Small models with ranges, rewritten for the tests of export."""

from __future__ import annotations

from typing import Any

import timm
import torch
import transformers
from torch import Tensor, nn

from fractrain_fx import FracConfig, FracModel, Precision
from fractrain_fx.capture.trees import tensors_in
from fractrain_fx.config import RunConfig
from tests.build import rewritten as build_rewritten

__all__ = ["HEADS", "SIZES", "Convolutions", "bert", "difference", "gpt2", "llama", "rewritten", "vit"]

SIZES: dict[str, Any] = {"vocab_size": 32, "max_position_embeddings": 32, "num_hidden_layers": 1}
HEADS: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}


class Convolutions(nn.Module):
    """Convolutions with batch norms of both signs, and a product of activations in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        nn.init.normal_(self.norm.weight)
        self.norm.running_mean.normal_()  # type: ignore[union-attr]
        self.norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = self.norm(self.conv(x)).flatten(2)
        return self.last((x @ x.transpose(1, 2)).mean(1))


def vit() -> nn.Module:
    sizes: dict[str, Any] = {
        "img_size": 32,
        "patch_size": 16,
        "embed_dim": 32,
        "depth": 1,
        "num_heads": 2,
        "num_classes": 4,
    }
    return timm.create_model("vit_tiny_patch16_224", **sizes)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**SIZES, **HEADS, num_key_value_heads=1)
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, **HEADS))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=32, n_positions=32)
    config.bos_token_id = config.eos_token_id = None
    return transformers.GPT2LMHeadModel(config)


def rewritten(model: nn.Module, *inputs: Tensor, **settings: Any) -> FracModel:
    """The model after its ranges have seen its example inputs."""
    torch.manual_seed(0)
    usual: dict[str, Any] = {} if "method" in settings else {"method": "static", "precision": Precision(8, 8)}
    config = FracConfig(**usual | {"run": RunConfig(backend="plain")} | settings)
    found = build_rewritten(model, *inputs, config=config)
    recording = found._state.recording
    found.calibrate([dict(recording.kwargs) or recording.args[0]])
    return found.eval()


@torch.no_grad()
def difference(ours: Any, theirs: Any) -> float:
    """The largest difference of outputs, as a share of the largest."""
    pairs = zip(tensors_in(ours), tensors_in(theirs), strict=True)
    return max(float((x - y).abs().max() / x.abs().max()) for x, y in pairs)
