"""The running range of an activation: what evaluation quantizes with."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fractrain_fx.formats import Format

__all__ = ["RunningRange"]


class RunningRange(nn.Module):
    """Base of activation quantizers: the batch's range in training, the running range in evaluation.

    ``running = keep * running + (1 - keep) * batch`` for both parts, starting from the first batch (ALGORITHM 2). A
    batch whose range is not finite leaves the running range as it was.

    Attributes:
        lo: low end of the running range (buffer, float32).
        span: its width (buffer, float32).
        seen: whether any batch has filled it (buffer, bool); until then evaluation means nothing.
    """

    lo: Tensor
    span: Tensor
    seen: Tensor

    def __init__(self, fmt: Format, keep: float = 0.9) -> None:
        super().__init__()
        self.fmt = fmt
        self.keep = keep
        self.register_buffer("lo", torch.zeros(()))
        self.register_buffer("span", torch.zeros(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))

    def range_of(self, x: Float[Tensor, "*dims"]) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """``lo`` and ``span`` to quantize ``x`` with; in training the running range moves towards them."""
        if not self.training:
            return self.lo, self.span
        lo, span = self.fmt.activation_range(x)
        self._update(lo.to(self.lo.dtype), span.to(self.span.dtype))
        return lo, span

    @torch.no_grad()
    def _update(self, lo: Tensor, span: Tensor) -> None:
        # Tensor arithmetic throughout: a branch on `seen` would break a compiled graph.
        finite = lo.isfinite() & span.isfinite()
        keep = torch.where(self.seen, self.keep, 0.0)
        self.lo.copy_(torch.where(finite, keep * self.lo + (1 - keep) * lo, self.lo))
        self.span.copy_(torch.where(finite, keep * self.span + (1 - keep) * span, self.span))
        self.seen.logical_or_(finite)
