"""Gates by C++ kernels on a CPU (``rounding="compiled"``): one op for an embedding, and one for a controller's step.

As operations of torch, a gate takes about 40 small ones. Each of its products wakes all threads, which takes longer
than the product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fractrain_fx.formats.affine.kernels import has_kernels
from fractrain_fx.native import kernels
from fractrain_fx.nn.hooks import is_hooked
from fractrain_fx.nn.rounding import refuse_create_graph

__all__ = ["choose", "embed", "has_gate_kernels", "small"]

# The kernels use one thread. Layers of more weights than these are quicker as products of matrices on all threads.
_SMALL = 1 << 16

_LAYERS = (nn.Linear, nn.LSTMCell)


def small(module: nn.Module) -> bool:
    """Whether a module of gates has few enough weights for the kernels."""
    return sum(weight.numel() for weight in module.parameters()) <= _SMALL


def has_gate_kernels(x: Tensor, first: nn.Module, second: nn.Module) -> bool:
    """Whether the kernels compute what two layers do with rows of samples.

    They do in float32, if the layers are torch's own without hooks: somebody may have put others in their place.
    """
    plain = all(type(layer) in _LAYERS and not is_hooked(layer) for layer in (first, second))
    return plain and has_kernels(x) and not torch.is_autocast_enabled("cpu")


def embed(x: Tensor, hidden: nn.Linear, output: nn.Linear) -> Tensor:
    """``output(relu(hidden(x)))``, up to the order of sums."""
    found: Tensor = _Embedding.apply(x, hidden.weight, hidden.bias, output.weight, output.bias)
    return found


def choose(
    x: Tensor, state: tuple[Tensor, Tensor] | None, cell: nn.LSTMCell, head: nn.Linear, *, lowest: int
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """A step of the controller (:meth:`Controller.forward`), up to the order of sums.

    Args:
        x: embedding of each sample.
        state: of the cell; ``None``: zeros.
        cell: the LSTM cell.
        head: gives the logits of the options.
        lowest: the first option that may be chosen.

    Returns:
        The one-hot of each sample's option, and the new state.
    """
    h, c = (None, None) if state is None else state
    weights = (cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh, head.weight, head.bias)
    choice, h, c = _Choice.apply(x, h, c, *weights, lowest)
    return choice, (h, c)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        found: Tensor
        found, between = kernels().gate_embedding(x, *weights)
        ctx.save_for_backward(x, between, *weights)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        found: tuple[Tensor, ...] = kernels().gate_embedding_errors(*grads, *ctx.saved_tensors)
        return found


class _Choice(torch.autograd.Function):
    """The gradient of the one-hot is that of the probabilities."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor | None, c: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        *weights, lowest = rest
        choice, next_h, next_c, kept = kernels().gate_choice(x, h, c, *weights, lowest)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, h, c, next_h, kept, *weights)
        return choice, next_h, next_c

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        _, h, c, *_ = ctx.saved_tensors
        of_x, of_h, of_c, *of_weights = kernels().gate_choice_errors(*grads, *ctx.saved_tensors)
        return of_x, None if h is None else of_h, None if c is None else of_c, *of_weights, None
