"""GPT-2 with four layers, for runs in which models deeper than the default of two are compared."""

from __future__ import annotations

from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

__all__ = ["four_layers"]


def four_layers(vocab_size: int) -> nn.Module:
    """64 wide, 4 heads, up to 256 tokens; as ``hf:gpt2`` but for its depth.

    Args:
        vocab_size: number of different tokens.
    """
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=256,
        n_embd=64,
        n_layer=4,
        n_head=4,
        n_inner=256,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)
