"""Shrink the default configuration of a Hugging Face model, by names and values of its fields."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

__all__ = ["PLANS", "Plan", "shrink"]

_VOCABULARY, _POSITIONS, _EXPERTS, _BLOCKS = 1024, 512, 16, 2
_DEPTH = re.compile(r"(^|_)(layers?|depths?|blocks|num_layers)$|^(depths|num_hidden_layers|n_layers?|layer_nums)$")
_HEADS = re.compile(r"(^|_)(heads?|num_heads|attention_heads|encoder_heads|decoder_heads|n_heads?)$")
_WIDTH = re.compile(
    r"hidden_size|hidden_dim|intermediate|d_model|d_ff|d_inner|ffn_dim|ffn_hidden|mlp_dim|embed_dim|embedding_size"
    r"|embedding_dim|projection_dim|output_dim|out_hidden|n_embd|n_inner|d_embed|(^|_)width$|neck_hidden|conv_dim"
    r"|^dim$|feature_size|fpn_feature|mask_feature|decoder_hidden|channels$|lru_width|embed_dims|^dims$|qk_dim"
)
_NEVER_WIDTH = re.compile(r"num_channels|in_channels|^in_chans|head_dim|input_channels|out_channels_stem")


@dataclass(frozen=True)
class Plan:
    """The sizes to make smaller: depth, width, side of images."""

    depth: bool
    width: bool
    image: bool


# The smallest comes first. Some parts of a configuration only fit each other at their full size.
PLANS = (
    Plan(True, True, True),
    Plan(True, True, False),
    Plan(True, False, True),
    Plan(True, False, False),
    Plan(False, True, True),
    Plan(False, True, False),
    Plan(False, False, False),
)


def shrink(kind: type[Any], plan: Plan) -> Any:
    """A configuration of class ``kind`` with a small vocabulary, and with the sizes of ``plan`` made smaller."""
    default = kind()
    heads = [number for part in _all(default) for number in _head_counts(part)]
    factor = _factor(heads) if plan.width else 1
    return _Shrinker(plan, factor, _smallest_vocabulary(default)).smaller(default)


class _Shrinker:
    """Rewrites one tree of configurations."""

    def __init__(self, plan: Plan, factor: int, vocabulary: int) -> None:
        self._plan = plan
        self._factor = factor
        self._vocabulary = vocabulary
        self._ids: dict[int, int] = {}

    def smaller(self, config: Any) -> Any:
        fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
        lengths = {len(v) for v in fields.values() if isinstance(v, list | tuple) and v and _is_int(v[0])}
        usual = vars(type(config)())
        changed: dict[str, Any] = {}
        for name, value in fields.items():
            new = self._field(name, value, lengths, fields)
            # A part may have other values than the defaults of its class.
            if name not in usual or _is_part(value) or new != usual[name]:
                changed[name] = new
        if getattr(config, "pad_token_id", None) is None and hasattr(config, "vocab_size"):
            changed["pad_token_id"] = 0
        return type(config)(**changed)

    def _field(self, name: str, value: Any, lengths: set[int], fields: dict[str, Any]) -> Any:
        if value is None:
            return self._left_open(name, fields)
        if _is_part(value):
            return self.smaller(value)
        if name.endswith("layerdrop"):
            return 0.0  # a graph cannot leave out layers at random, and capture asks to switch it off
        if name.endswith(("token_id", "token_index", "token_ids")):
            return self._token(value)
        if name == "axial_pos_shape":
            return type(value)((4, 4))  # their product is the length of the text
        if isinstance(value, list | tuple) and value and all(isinstance(item, str) for item in value):
            return self._kinds(value, fields)
        if isinstance(value, list | tuple) and value and all(_is_int(item) for item in value):
            return type(value)(self._number(name, item, set(), fields) for item in value)
        return self._number(name, value, lengths, fields) if _is_int(value) else value

    def _left_open(self, name: str, fields: dict[str, Any]) -> Any:
        """Fill in fields that a configuration leaves open for each task or checkpoint."""
        if name == "head_dim" and _is_int(fields.get("hidden_size")) and _is_int(fields.get("num_attention_heads")):
            return fields["hidden_size"] // fields["num_attention_heads"]
        return {"prediction_length": 8, "vocab_size": 64}.get(name)

    def _number(self, name: str, value: int, lengths: set[int], fields: dict[str, Any]) -> int:
        if name.endswith("vocab_size"):
            return min(value, _VOCABULARY)
        if name in ("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions", "n_ctx"):
            return min(value, _POSITIONS)
        if re.fullmatch(r"(num|n|moe_num|num_local|n_routed)_(routed_)?experts", name):
            return min(value, _EXPERTS)
        if self._plan.depth and _DEPTH.search(name) and not name.startswith("num_feat"):
            # As long as a list of sizes (hidden_sizes): this is a number of stages, not of layers.
            return value if value in lengths else min(value, _BLOCKS)
        if self._plan.image and name == "image_size":
            return _side(value, fields.get("patch_size"))
        if self._factor > 1:
            if _HEADS.search(name):
                return max(1, value // self._factor)
            if _WIDTH.search(name) and not _NEVER_WIDTH.search(name) and value % self._factor == 0 and value >= 32:
                return value // self._factor
        return value

    def _kinds(self, value: Any, fields: dict[str, Any]) -> Any:
        """A list with a word for each layer, cut to the remaining layers, with as many different words as possible."""
        depths = {v for name, v in fields.items() if _DEPTH.search(name) and _is_int(v)}
        if not self._plan.depth or len(value) not in depths or len(value) <= _BLOCKS:
            return value
        kinds = list(dict.fromkeys(value))
        return type(value)((kinds * _BLOCKS)[:_BLOCKS])

    def _token(self, value: Any) -> Any:
        """Special tokens with distinct ids inside the small vocabulary."""
        if isinstance(value, list | tuple):
            return type(value)(self._token(token) for token in value)
        if not _is_int(value) or value < self._vocabulary:
            return value
        return self._ids.setdefault(value, self._vocabulary - 1 - len(self._ids))


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_part(value: Any) -> bool:
    """Whether a field is the configuration of a part of the model."""
    return hasattr(value, "to_dict") and hasattr(value, "model_type")


def _all(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if _is_part(value):
            yield from _all(value)


def _head_counts(config: Any) -> Iterator[int]:
    for name, value in vars(config).items():
        if _HEADS.search(name) and not re.search(r"key_value|kv", name):
            yield from (count for count in (value if isinstance(value, list | tuple) else [value]) if _is_int(count))


def _factor(heads: list[int]) -> int:
    """The largest number of at most 16 that divides all counts of heads, and leaves two of each if possible."""
    many = [count for count in heads if count > 1]
    if not many:
        return 8
    common = math.gcd(*many)
    divisors = [d for d in range(1, 17) if common % d == 0]
    return max((d for d in divisors if min(many) // d >= 2), default=1)


def _smallest_vocabulary(config: Any) -> int:
    sizes = [getattr(part, "vocab_size", None) for part in _all(config)]
    return min([size for size in sizes if _is_int(size) and size > 64] + [_VOCABULARY])


def _side(size: int, patch: Any) -> int:
    """Four patches, or a quarter of the side."""
    if _is_int(patch) and patch >= 8:
        return min(size, 4 * patch)
    return size // 4 if size % 128 == 0 or size % 112 == 0 else size
