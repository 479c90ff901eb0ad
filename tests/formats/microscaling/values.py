"""Ordinary and extreme values."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["tensors"]


def tensors() -> dict[str, Tensor]:
    normal = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    return {
        "normal": normal,
        "heavy-tailed": normal / torch.randn(64, 128, generator=torch.Generator().manual_seed(1)),
        "tiny": normal * 1e-30,
        "huge": normal / normal.abs().max() * 3.38e38,
        "as large as bfloat16 goes": (normal / normal.abs().max()).clamp(-0.996, 0.996) * 3.4028234e38,
        "sparse": normal * (normal > 1.5),
        "of many sizes": (8 * normal).exp() * normal.sign(),
    }
