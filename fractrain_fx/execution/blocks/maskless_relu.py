"""ReLUs whose gradient needs no mask in a compiled graph on a CPU.

For the gradient of torch's own ReLU, torch's compiler saves a mask beside the output. On a CPU with AVX2, its code
writes and reads masks one value at a time, which took a tenth of a compiled training step of a Transformer. Here the
gradient is computed from the output.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from fractrain_fx.execution.blocks.original import Original
from fractrain_fx.nn.hooks import is_hooked

__all__ = ["MasklessReLU", "relu"]


def relu(input: Float[Tensor, "*dims"], inplace: bool = False) -> Float[Tensor, "*dims"]:
    """``torch.nn.functional.relu``, with its gradient; compiled for a CPU, it never writes into its input."""
    if _masks_are_slow(input):
        result: Tensor = _Maskless.apply(input)
        return result
    return F.relu(input, inplace=inplace)


class MasklessReLU(nn.Module):
    """An ``nn.ReLU`` of the model, which is called as it is unless a compiled graph on a CPU needs the maskless form.

    Args:
        original: the module.
    """

    def __init__(self, original: Original) -> None:
        super().__init__()
        self.original = original

    def forward(self, x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
        """The values above zero, and zero elsewhere."""
        module = self.original.find()
        plain = _masks_are_slow(x) and type(module) is nn.ReLU and not is_hooked(module)
        y: Tensor = relu(x) if plain else module(x)
        return y


def _masks_are_slow(x: Tensor) -> bool:
    return torch.compiler.is_compiling() and x.is_cpu


class _Maskless(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.relu(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        (g,) = grads
        # A comparison with plain 0 depends on nothing in backward, so the compiler would move it into forward. This
        # zero takes its sign from the gradient; comparisons ignore the sign of a zero.
        zero = g.new_zeros(()).copysign(g)
        return torch.where(y <= zero, 0.0, g)
