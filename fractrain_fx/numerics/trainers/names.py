"""The names that trainers give to layers of Hugging Face's LLaMA and GPT-2. Any other layer keeps its name."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["MEGATRON", "TORCHTITAN", "renamed"]

MEGATRON: Mapping[str, str] = {
    r"model\.layers\.(\d+)\.self_attn\.[qkv]_proj": r"decoder.layers.\1.self_attention.linear_qkv",
    r"model\.layers\.(\d+)\.self_attn\.o_proj": r"decoder.layers.\1.self_attention.linear_proj",
    r"model\.layers\.(\d+)\.mlp\.(gate|up)_proj": r"decoder.layers.\1.mlp.linear_fc1",
    r"model\.layers\.(\d+)\.mlp\.down_proj": r"decoder.layers.\1.mlp.linear_fc2",
    r"transformer\.h\.(\d+)\.attn\.c_attn": r"decoder.layers.\1.self_attention.linear_qkv",
    r"transformer\.h\.(\d+)\.attn\.c_proj": r"decoder.layers.\1.self_attention.linear_proj",
    r"transformer\.h\.(\d+)\.mlp\.c_fc": r"decoder.layers.\1.mlp.linear_fc1",
    r"transformer\.h\.(\d+)\.mlp\.c_proj": r"decoder.layers.\1.mlp.linear_fc2",
    r"lm_head": "output_layer",
}
"""Megatron-core multiplies queries, keys and values in one layer, and gate and up projection in one."""

TORCHTITAN: Mapping[str, str] = {
    r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj": r"layers.\1.attention.qkv_linear.w\2",
    r"model\.layers\.(\d+)\.self_attn\.o_proj": r"layers.\1.attention.wo",
    r"model\.layers\.(\d+)\.mlp\.gate_proj": r"layers.\1.feed_forward.w1",
    r"model\.layers\.(\d+)\.mlp\.down_proj": r"layers.\1.feed_forward.w2",
    r"model\.layers\.(\d+)\.mlp\.up_proj": r"layers.\1.feed_forward.w3",
}


def renamed(name: str, names: Mapping[str, str]) -> str:
    """A trainer's name for a layer."""
    for pattern, theirs in names.items():
        if (match := re.fullmatch(pattern, name)) is not None:
            return match.expand(theirs)
    return name
