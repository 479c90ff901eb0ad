"""The seed of a step's rounding noise, as a tensor on a graph edge."""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor, nn

from fractrain_fx.formats.bits import once
from fractrain_fx.formats.noise import draw_seed

__all__ = ["NoiseSeed"]

# Distance between the seeds of two processes: so large that no process meets the seeds of another process's ops.
_BETWEEN_RANKS = 0x9E3779B97F4A7C1


class NoiseSeed(nn.Module):
    """Draws one seed for each training step from torch's default generator, and shifts it differently on each process.

    So ``torch.manual_seed`` fixes the noise of a run, each step has other noise, and processes that were given the same
    seed still round differently. Evaluation draws nothing.
    """

    where: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Its device tells a compiled graph where to draw. An eager step draws on the host, which needs the number.
        self.register_buffer("where", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self) -> Int[Tensor, ""]:
        """A 0-dim int64 tensor."""
        if not self.training:
            return self.where
        device = self.where.device if torch.compiler.is_compiling() else "cpu"
        together = dist.is_available() and dist.is_initialized()
        return once(draw_seed(device) + (dist.get_rank() if together else 0) * _BETWEEN_RANKS)
