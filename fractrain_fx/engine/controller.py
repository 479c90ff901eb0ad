"""The cost term of DFQ's loss: which way it pushes and how hard (paper, equation 2; ALGORITHM 5).

With ``c[n, b, k]`` the one-hot choice of sample ``n`` in block ``b``, ``s[k]`` the cost share of option ``k`` and
``m[b]`` a block's MACs, the cost of a step over ``N`` samples and ``B`` blocks is

    cp = 1/N * sum_n sum_b m[b] / sum(m) * sum_k c[n, b, k] * s[k].

Its gradient for one choice falls with both ``N`` and ``B``. The term that is added to the loss undoes that:

    term = beta * N * B * cp / s_ref = beta * sum_n sum_b (m[b] / mean(m)) * sum_k c[n, b, k] * s[k] / s_ref,

so that choosing the mean option instead of none, for one sample in one block of mean size, changes the loss by
``beta``, whatever the batch, the depth and the options. ``s_ref`` is the mean share of the options that do not skip.

``N`` counts the samples of an *optimizer step*. Accumulating gradients over ``A`` batches divides each loss by ``A``,
and DDP averages gradients over ``W`` processes; the term of one batch is therefore multiplied by ``A * W``, and the
step equals that of one process which sees all the samples at once. A loop that divides otherwise says by what.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from fractrain_fx.engine.distributed import sum_over_ranks, world_size
from fractrain_fx.nn.cost import OpCost
from fractrain_fx.precision import Precision

__all__ = ["CostController", "option_share"]


def option_share(option: Precision, weight_bits: int) -> float:
    """Training cost of an op with weights under ``option``, as a share 0..1 of full precision (ALGORITHM 4)."""
    return sum(OpCost((1, 1, 1)).spent(option, weight_bits)) / 3


class CostController:
    """Steers cp to a target by the sign of the cost term.

    Args:
        beta: change of the loss for one sample's choice of the mean option in one block of mean size.
        width: dead band above the target, in per cent of the full-precision cost.
        options: what the gates choose from.
        weight_bits: bits of gated weights.
        accumulate: batches whose gradients make one optimizer step, each loss divided by that number.
    """

    def __init__(
        self, beta: float, width: float, options: Sequence[Precision], weight_bits: int, accumulate: int = 1
    ) -> None:
        shares = [option_share(option, weight_bits) for option in options if not option.skips]
        self._strength = beta * len(shares) / sum(shares)
        self._width = width / 100
        self.accumulate = accumulate
        self._batches = 0
        self._seen: Tensor | None = None

    def term(
        self, cp: Float[Tensor, ""], target: float, samples: int, blocks: int, weight: float | None = None
    ) -> Float[Tensor, ""]:
        """The signed cost term of one batch, to be added to its mean task loss.

        The sign is -1 while cp is below ``target`` (spend more), 0 inside the dead band and +1 from there on. It is
        taken from cp over all processes and over the batches of this optimizer step so far, without waiting for the
        device.

        Args:
            cp: differentiable cost share 0..1 of the batch in this process.
            target: cost to hold, in per cent.
            samples: samples of the batch in this process.
            blocks: gated blocks of the model.
            weight: by what the loop will divide the loss; ``accumulate`` by default.
        """
        weight = self.accumulate if weight is None else weight
        sign = self._sign(cp.detach().float(), target / 100, samples)
        return sign * (self._strength * weight * world_size() * samples * blocks) * cp

    def start_step(self) -> None:
        """Forget the batches seen since the last optimizer step."""
        self._batches = 0
        self._seen = None

    def _sign(self, cp: Tensor, target: float, samples: int) -> Tensor:
        seen = sum_over_ranks(torch.stack([cp * samples, torch.full_like(cp, samples)]))
        self._seen = seen if self._seen is None else self._seen + seen
        mean = self._seen[0] / self._seen[1]
        self._batches += 1
        if self._batches >= self.accumulate:
            self.start_step()
        return (mean >= target + self._width).to(cp.dtype) - (mean < target).to(cp.dtype)
