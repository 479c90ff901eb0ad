"""A branch's last batch norm and the skip behind it, as one autograd Function that saves only the norm's input."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fractrain_fx.execution.blocks.original import Original
from fractrain_fx.formats.bits import readable, work_dtype
from fractrain_fx.nn.gates import Skip
from fractrain_fx.nn.hooks import is_hooked
from fractrain_fx.nn.rounding import refuse_create_graph

__all__ = ["SkippedNorm", "is_plain_norm"]


class SkippedNorm(nn.Module):
    """``(1 - choice_0) * norm(x)`` with the numbers of the two modules.

    As separate modules, the norm saves its input, and the skip saves the norm's output for the gradient of its choice.
    Those outputs are the largest part of the memory that a gated ResNet keeps beyond a float one. But the norm is
    ``a x + c`` for each channel, so the sum of ``g * norm(x)`` over a sample follows from the sums of ``g * x`` and
    ``g``.

    Args:
        norm: the norm; if it is not a plain one (any more), both modules run as they are.
        skip: the module behind the norm.
    """

    def __init__(self, norm: Original, skip: Skip) -> None:
        super().__init__()
        # In a tuple, which torch does not register as children: their state must not get a second name.
        self._parts = (norm, skip)

    @property
    def norm(self) -> Original:
        """The norm."""
        return self._parts[0]

    def extra_repr(self) -> str:
        return repr(self.norm)

    def forward(self, x: Float[Tensor, "*dims"], choice: Float[Tensor, "batch options"]) -> Float[Tensor, "*dims"]:
        """The norm's output, with zeros for samples that skip; the norm's running averages move as always."""
        original, skip = self._parts
        norm = original.find()
        # With one value for each channel there is no variance, which the norm itself refuses in training.
        if not (is_plain_norm(norm) and readable(x) and x.numel() > norm.num_features):
            masked: Tensor = skip(norm(x), choice)
            return masked
        batch = norm.training or norm.running_mean is None
        if norm.training and norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
        keep = (1 - choice[:, 0]).to(x.dtype)
        averages = (norm.running_mean, norm.running_var)
        result: Tensor = _SkippedNorm.apply(x, keep, norm.weight, norm.bias, averages, batch, norm.momentum, norm.eps)
        return result


def is_plain_norm(norm: nn.Module) -> TypeGuard[_BatchNorm]:
    """Whether a module computes torch's own batch norm, with samples in dimension 0, and has no hooks."""
    if type(norm) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        return False
    assert isinstance(norm, _BatchNorm)
    tracks = norm.running_mean is not None  # `track_running_stats` may have been changed since the norm was made
    return norm.momentum is not None and norm.track_running_stats == tracks and not is_hooked(norm)


class _SkippedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        keep: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        averages: tuple[Tensor | None, Tensor | None],
        batch: bool,
        momentum: float,
        eps: float,
    ) -> Tensor:
        y, mean, inverse = torch.native_batch_norm(x, weight, bias, *averages, batch, momentum, eps)
        # Evaluation normalises with the running averages, which may have changed by the time of backward.
        stats = (mean, inverse) if batch else tuple(None if buffer is None else buffer.clone() for buffer in averages)
        ctx.save_for_backward(x, keep, weight, bias, *stats)
        ctx.batch, ctx.eps = batch, eps
        # No sample skips where only those that compute a block are here.
        ctx.skips = bool((keep != 1).any())
        return y.mul_(_along(keep, y)) if ctx.skips else y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        x, keep, weight, bias, mean, width = ctx.saved_tensors
        (g,) = grads
        of_keep = None
        if ctx.needs_input_grad[1]:
            wide, positions = work_dtype(g), list(range(2, x.ndim))
            inverse = width.to(wide) if ctx.batch else (width.to(wide) + ctx.eps).rsqrt()
            slope = inverse if weight is None else weight.to(wide) * inverse
            start = -mean.to(wide) * slope if bias is None else bias.to(wide) - mean.to(wide) * slope
            of_keep = _sums(g.to(wide) * x, positions) @ slope + _sums(g.to(wide), positions) @ start
            of_keep = of_keep.to(keep.dtype)
        needs = [ctx.needs_input_grad[0], weight is not None, bias is not None]
        ends = (None, None, mean, width) if ctx.batch else (mean, width, None, None)
        masked = g * _along(keep, g) if ctx.skips else g
        gradients = torch.ops.aten.native_batch_norm_backward(masked, x, weight, *ends, ctx.batch, ctx.eps, needs)
        return gradients[0], of_keep, gradients[1], gradients[2], *[None] * 4


def _along(keep: Tensor, x: Tensor) -> Tensor:
    return keep.view(-1, *[1] * (x.ndim - 1))


def _sums(x: Tensor, positions: list[int]) -> Float[Tensor, "batch channels"]:
    """Sums over the positions of each channel of each sample."""
    return x.sum(positions) if positions else x
