"""Attention between its two products is torch's, gradients included."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fractrain_fx.nn.attention import attention_probabilities

SHAPE = (2, 3, 5, 4)  # batch, heads, positions, width


def masks() -> dict[str, dict[str, object]]:
    padding = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    padding[1, :, :, 3:] = False
    empty = padding.clone()
    empty[0, :, 2] = False  # a position that sees nothing
    bias = torch.randn(1, 3, 5, 5)
    hidden = torch.zeros(2, 1, 5, 5).masked_fill(~empty, -math.inf)
    return {
        "none": {},
        "scale": {"scale": 0.3},
        "causal": {"is_causal": True},
        "padding": {"attn_mask": padding},
        "a row of padding": {"attn_mask": empty},
        "bias": {"attn_mask": bias},
        "added": {"attn_mask": hidden},
    }


@pytest.mark.parametrize("name", masks())
def test_equals_torchs_attention(name: str) -> None:
    torch.manual_seed(0)
    options = masks()[name]
    q, k, v = (torch.randn(SHAPE, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = options.get("attn_mask")
    if isinstance(mask, Tensor) and mask.is_floating_point():
        options["attn_mask"] = mask = mask.double().requires_grad_(name == "bias")
    wanted = [q, k, v] + ([mask] if isinstance(mask, Tensor) and mask.requires_grad else [])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q, k, v, **options)  # type: ignore[arg-type]
    actual = attention_probabilities(q @ k.mT, q, **options) @ v  # type: ignore[arg-type]
    torch.testing.assert_close(actual, expected)
    weights = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(actual, wanted, weights), torch.autograd.grad(expected, wanted, weights), strict=True
    ):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, theirs.nan_to_num())
