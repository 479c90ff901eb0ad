"""The cost term of DFQ's loss and the unit of its strength (paper, equation 2).

With ``c[n, b, k]`` the one-hot choice of sample ``n`` in block ``b``, ``s[k]`` the cost share of option ``k`` and
``m[b]`` a block's MACs, the cost of a step over ``N`` samples and ``B`` blocks is

    cp = 1/N * sum_n sum_b m[b] / sum(m) * sum_k c[n, b, k] * s[k].

Its gradient for one choice falls with both ``N`` and ``B``. The term that is added to the loss cancels both:

    term = beta * N * B * cp / s_ref = beta * sum_n sum_b (m[b] / mean(m)) * sum_k c[n, b, k] * s[k] / s_ref,

so that choosing the mean option instead of none, for one sample in one block of mean size, changes the loss by
``beta``, whatever the batch, the depth and the options. ``s_ref`` is the mean share of the options that do not skip.
The authors' code adds ``beta * sum_n sum_b (FW + EB + GC)``, each a share of its own 32 x 32 product, and their sum is
``3 * cp``: there ``s_ref`` is a third, and the same ``beta`` pushes less (:func:`authors_beta`).

The control multiplies the term by its strength, which follows the error of cp. The gates integrate every push, so
``sign`` never settles: cp swings about its target, and all samples swing with it. ``multiplier`` is dual ascent on the
constraint that mean cost equals the target, with a proportional part (Stooke et al., arXiv 2007.03964). It may be
negative.

``N`` counts the samples of an *optimizer step*. Accumulating gradients over ``A`` batches divides each loss by ``A``,
and DDP averages gradients over ``W`` processes; the term of one batch is therefore multiplied by ``A * W``, and the
step equals that of one process that sees all samples at once. A loop with another divisor passes ``weight``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from fractrain_fx.config import GateConfig
from fractrain_fx.config.precision import Precision
from fractrain_fx.engine.distributed import sum_over_ranks, world_size

__all__ = ["CostTerm", "authors_beta"]


def authors_beta(options: Sequence[Precision], weight_bits: int) -> float:
    """The ``GateConfig.beta`` that pushes as the authors' code does with its 1e-3.

    Args:
        options: the options of the gates.
        weight_bits: bits of gated weights.
    """
    shares = [option.mean_share(weight_bits) for option in options if not option.skips]
    return 3e-3 * sum(shares) / len(shares)


class CostTerm:
    """Steers cp to a target by the strength of the cost term.

    Args:
        gate: control, strength and dead band.
        options: the options of the gates.
        weight_bits: bits of gated weights.

    Attributes:
        accumulate: batches whose gradients make one optimizer step, each loss divided by that number.
    """

    def __init__(self, gate: GateConfig, options: Sequence[Precision], weight_bits: int) -> None:
        shares = [option.mean_share(weight_bits) for option in options if not option.skips]
        self._beta = gate.beta * len(shares) / sum(shares)
        self._dead_band = gate.dead_band / 100
        self._control, self._gain, self._integral_gain = gate.control, gate.gain, gate.integral_gain
        self._integral: Tensor | float = 0.0
        self._next_integral: Tensor | float = 0.0
        self.accumulate = 1
        self._batches = 0
        self._seen: Tensor | None = None

    def of_batch(
        self, cp: Float[Tensor, ""], target: float, samples: int, blocks: float, weight: float | None = None
    ) -> Float[Tensor, ""]:
        """The cost term of one batch, to be added to its mean task loss.

        Its strength is negative while cp is below ``target`` (spend more), 0 inside the dead band and positive above;
        a multiplier may keep the other sign for a while. It depends on cp over all processes and over the batches of
        this optimizer step so far. Computing it does not wait for the device.

        Args:
            cp: differentiable cost share 0..1 of the batch in this process.
            target: cost to hold, in per cent.
            samples: samples of the batch in this process.
            blocks: gated blocks of the model, over their share of cp.
            weight: the number by which the loop will divide the loss; ``accumulate`` by default.
        """
        weight = self.accumulate if weight is None else weight
        if not samples:  # the mean cost of no samples is NaN
            cp = cp.nan_to_num()
        error = self._error(self._mean(cp.detach().float(), samples), target / 100)
        strength = error.sign()
        if self._control == "multiplier":
            strength = self._gain * error + self._integral
            self._next_integral = self._integral + self._integral_gain * error
        self._batches += 1
        if self._batches >= self.accumulate:
            self.start_step()
        return strength * (self._beta * weight * world_size() * samples * blocks) * cp

    def start_step(self) -> None:
        """Close the optimizer step: forget its batches, and update the integral."""
        self._batches = 0
        self._seen = None
        self._integral = self._next_integral

    def state_dict(self) -> dict[str, float]:
        """The integral that a multiplier keeps between optimizer steps; the same on every process."""
        return {"integral": float(self._next_integral)} if self._control == "multiplier" else {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from what ``state_dict`` gave, with a new optimizer step."""
        self.start_step()
        self._integral = self._next_integral = float(state.get("integral", 0.0))

    def _mean(self, cp: Tensor, samples: int) -> Tensor:
        """Cost over the batches of this optimizer step so far, in all processes."""
        sums = sum_over_ranks(torch.stack([cp * samples, torch.full_like(cp, samples)]))
        self._seen = sums if self._seen is None else self._seen + sums
        return self._seen[0] / self._seen[1].clamp(min=1)

    def _error(self, cp: Tensor, target: float) -> Tensor:
        """Relative error of cp from the nearer end of the dead band; at the target itself it is positive."""
        below, above = (cp < target).to(cp.dtype), (cp >= target + self._dead_band).to(cp.dtype)
        far = below * (cp - target) + above * (cp - target - self._dead_band)
        return (far + above * torch.finfo(cp.dtype).tiny) / target
