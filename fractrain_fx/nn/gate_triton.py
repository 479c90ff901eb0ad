"""Gates by Triton kernels on a GPU: one launch each way for an embedding, and one for a controller's step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fractrain_fx.kernels.triton.gate_calls import (
    Sizes,
    choose_by_triton,
    choose_errors_by_triton,
    embed_by_triton,
    embed_errors_by_triton,
    rows_of,
)
from fractrain_fx.nn.gates import State
from fractrain_fx.nn.rounding import refuse_create_graph

__all__ = ["choose_on_gpu", "embed_on_gpu"]

# The packed weights of the step that made a state, for the step that gets it.
_packed = WeakTensorKeyDictionary()


def embed_on_gpu(x: Tensor, hidden: nn.Linear, output: nn.Linear) -> Tensor:
    """``output(relu(hidden(x)))``, up to the order of sums."""
    weights = hidden.weight, hidden.bias, output.weight, output.bias
    embedded: Tensor = _Embedding.apply(x.contiguous(), *(weight.contiguous() for weight in weights))
    return embedded


def choose_on_gpu(
    x: Tensor, state: State | None, cell: nn.LSTMCell, head: nn.Linear, *, lowest: int
) -> tuple[Tensor, State]:
    """A step of the controller, as :meth:`fractrain_fx.nn.gates.Controller.forward`, up to the order of sums."""
    h, c = (None, None) if state is None else (tensor.contiguous() for tensor in state)
    sizes = Sizes(x.shape[1], cell.hidden_size, len(head.weight))
    packed = None if h is None else _packed.get(h)
    if packed is None or len(packed) != rows_of(x, sizes):
        weights = (cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh, head.weight, head.bias)
        packed = torch.cat([weight.flatten() for weight in weights]).expand(rows_of(x, sizes), -1)
    choice, h, c, packed = _Choice.apply(x.contiguous(), h, c, packed, sizes, lowest)
    _packed[h] = packed
    return choice, (h, c)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        embedded, between = embed_by_triton(x, *weights)
        ctx.save_for_backward(x, between, *weights)
        return embedded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        return embed_errors_by_triton(grads[0].contiguous(), *ctx.saved_tensors)


class _Choice(torch.autograd.Function):
    """The gradient of the one-hot is that of the probabilities.

    Packed weights pass through all steps, so that the gradient of a step adds its own to that of later steps.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, h: Tensor | None, c: Tensor | None, packed: Tensor, sizes: Sizes, lowest: int
    ) -> tuple[Tensor, ...]:
        choice, next_h, next_c, kept = choose_by_triton(x, h, c, packed, sizes, lowest)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, h, c, next_h, kept, packed)
        ctx.sizes = sizes
        return choice, next_h, next_c, packed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        of_choice, of_h, of_c, later = grads
        x, h, c, next_h, kept, packed = ctx.saved_tensors
        gradients = of_choice, of_h, of_c, later
        return (*choose_errors_by_triton(gradients, x, h, c, next_h, kept, packed, ctx.sizes), None, None)
