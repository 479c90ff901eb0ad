"""Scaled dot-product attention around its two products, as torch documents it."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from fractrain_fx.formats.bits import readable

__all__ = ["attention_probabilities", "in_order", "repeat_heads"]


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
    scale = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    # Masks are added, not filled in: a mask is small until it broadcasts over heads, and is added to the scores in the
    # same pass that scales them.
    mask: Tensor | None = None
    if is_causal:  # torch allows no other mask beside it
        mask = scores.new_full(scores.shape[-2:], -math.inf).triu(1)
    elif attn_mask is not None:
        mask = attn_mask
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, -math.inf)
    empty: Tensor | None = None
    if attn_mask is not None and mask is not None:
        empty = (mask == -math.inf).all(dim=-1, keepdim=True)
        if readable(empty) and not empty.any():
            empty = None
        else:  # the softmax of a row without keys is NaN, and so is its gradient
            mask = mask.masked_fill(empty, 0.0)
    probabilities = F.softmax(scores * scale if mask is None else torch.add(mask, scores, alpha=scale), dim=-1)
    if empty is not None:
        probabilities = probabilities.masked_fill(empty, 0.0)
    return F.dropout(probabilities, p=dropout_p)


def in_order(x: Float[Tensor, "*x"], order: tuple[int, ...]) -> Float[Tensor, "*x"]:
    """``x`` with its dimensions in this order in memory, the outermost first; it is copied only if they are not."""
    turned = x.permute(order)
    if turned.is_contiguous():
        return x
    return turned.contiguous().permute([order.index(dim) for dim in range(x.ndim)])
