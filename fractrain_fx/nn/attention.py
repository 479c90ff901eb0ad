"""Scaled dot-product attention between its two products, as torch documents it."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

__all__ = ["attention_probabilities", "repeat_heads"]


def repeat_heads(x: Float[Tensor, "*batch heads length width"], query: Tensor) -> Tensor:
    """Repeat key or value heads until there are as many as query heads (grouped-query attention)."""
    return x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3)


def attention_probabilities(
    scores: Float[Tensor, "*batch queries keys"],
    query: Tensor,
    attn_mask: Bool[Tensor, "*#batch #queries keys"] | Float[Tensor, "*#batch #queries keys"] | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Float[Tensor, "*batch queries keys"]:
    """Softmax (with mask, causality and dropout) of ``query @ key.T``.

    A row whose keys are all masked gives zeros, as in torch.
    """
    scores = scores * (scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    masked = attn_mask is not None or is_causal
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    probabilities = F.softmax(scores, dim=-1)
    if masked:
        empty = (scores == -math.inf).all(dim=-1, keepdim=True)
        probabilities = probabilities.masked_fill(empty, 0.0)
    return F.dropout(probabilities, p=dropout_p)
