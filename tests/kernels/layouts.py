"""Orders of memory, and a seed of noise."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SEED", "laid"]

SEED = torch.tensor(123456789123456)


def laid(x: Tensor, layout: str) -> Tensor:
    """The same values in another order of memory."""
    match layout:
        case "reversed":
            order = [*reversed(range(x.ndim))]
            return x.permute(order).contiguous().permute(order)
        case "inner dimensions first":
            return x.movedim(1, -1).contiguous().movedim(-1, 1)
        case "with gaps":
            return torch.stack([x, x], -1).flatten(-2)[..., ::2]
        case "expanded":
            return x[..., :1].expand(x.shape)
        case _:
            return x
