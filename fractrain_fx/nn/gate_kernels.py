"""Gates by kernels, C++ on a CPU and Triton on a GPU: one op for an embedding, and one for a controller's step.

As operations of torch, a gate takes about 40 small ones. Each of its products wakes all threads, which takes longer
than the product.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fractrain_fx.kernels.triton import has_triton
from fractrain_fx.native import kernels, known_to_compiler
from fractrain_fx.nn.gate_triton import choose_on_gpu, embed_on_gpu
from fractrain_fx.nn.gates import BlockEmbedding, Controller, State
from fractrain_fx.nn.hooks import is_hooked
from fractrain_fx.nn.rounding import refuse_create_graph

__all__ = ["BlockEmbeddingByKernels", "ControllerByKernels"]

# The kernels use one thread. Layers of more weights than these are quicker as products of matrices on all threads.
_SMALL = 1 << 16

# A program of a Triton kernel holds all outputs of a layer.
_WIDE = 64

_LAYERS = (nn.Linear, nn.LSTMCell)


class BlockEmbeddingByKernels(BlockEmbedding):
    """An embedding whose layers, where they are small, are one op on devices of the types ``kernels``."""

    def __init__(self, *args: Any, kernels: tuple[str, ...] = ("cpu", "cuda")) -> None:
        super().__init__(*args)
        self._small, self._kernels = _is_small(self), kernels
        self._narrow = self._small and max(self.output.weight.shape) <= _WIDE

    def embed(self, pooled: Float[Tensor, "batch features"]) -> Float[Tensor, "batch dims"]:
        layers = self.hidden, self.output
        if self._small and "cpu" in self._kernels and _has_kernels(pooled, *layers):
            return _embed(pooled, *layers)
        if self._narrow and "cuda" in self._kernels and _has_triton(pooled, *layers):
            return embed_on_gpu(pooled, *layers)
        return super().embed(pooled)


class ControllerByKernels(Controller):
    """A controller whose step, if the cell is small, is one op on devices of the types ``kernels``."""

    def __init__(self, *args: Any, kernels: tuple[str, ...] = ("cpu", "cuda")) -> None:
        super().__init__(*args)
        self._small, self._kernels = _is_small(self), kernels
        self._narrow = self._small and max(self.cell.input_size, *self.head.weight.shape) <= _WIDE

    def forward(
        self, embedding: Float[Tensor, "batch dims"], state: State | None, skippable: bool
    ) -> tuple[Float[Tensor, "batch options"], State]:
        lowest = 0 if skippable else 1
        if self._small and "cpu" in self._kernels and _has_kernels(embedding, self.cell, self.head):
            return _choose(embedding, state, self.cell, self.head, lowest=lowest)
        if self._narrow and "cuda" in self._kernels and _has_triton(embedding, self.cell, self.head):
            return choose_on_gpu(embedding, state, self.cell, self.head, lowest=lowest)
        return super().forward(embedding, state, skippable)


def _is_small(module: nn.Module) -> bool:
    """Whether a module of gates has few enough weights for the kernels."""
    return sum(weight.numel() for weight in module.parameters()) <= _SMALL


def _has_kernels(x: Tensor, first: nn.Module, second: nn.Module) -> bool:
    """Whether the C++ kernels compute what two layers do with rows of samples.

    They do in float32, if the layers are torch's own without hooks: somebody may have put others in their place.
    Compiled graphs call them too.
    """
    fit = x.dtype == torch.float32 and x.is_cpu and x.numel() > 0 and not torch.is_autocast_enabled("cpu")
    return fit and _plain(first, second) and (not torch.compiler.is_compiling() or _known_to_compiler())


def _has_triton(x: Tensor, first: nn.Module, second: nn.Module) -> bool:
    """Whether the Triton kernels do, in eager mode."""
    fit = x.dtype == torch.float32 and has_triton(x) and not torch.is_autocast_enabled("cuda")
    return fit and _plain(first, second)


def _plain(*layers: nn.Module) -> bool:
    return all(type(layer) in _LAYERS and not is_hooked(layer) for layer in layers)


def _embed(x: Tensor, hidden: nn.Linear, output: nn.Linear) -> Tensor:
    """``output(relu(hidden(x)))``, up to the order of sums."""
    embedded: Tensor = _Embedding.apply(x, hidden.weight, hidden.bias, output.weight, output.bias)
    return embedded


def _choose(
    x: Tensor, state: tuple[Tensor, Tensor] | None, cell: nn.LSTMCell, head: nn.Linear, *, lowest: int
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """A step of the controller (:meth:`Controller.forward`), up to the order of sums.

    ``x`` is the embedding of each sample; a cell without ``state`` starts with zeros; ``lowest`` is the first option
    that may be chosen. Gives the one-hot of each sample's option, and the new state.
    """
    h, c = (None, None) if state is None else state
    weights = (cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh, head.weight, head.bias)
    choice, h, c = _Choice.apply(x, h, c, *weights, lowest)
    return choice, (h, c)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        embedded: Tensor
        embedded, between = _ops().gate_embedding(x, *weights)
        ctx.save_for_backward(x, between, *weights)
        return embedded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        gradients: tuple[Tensor, ...] = _ops().gate_embedding_errors(*grads, *ctx.saved_tensors)
        return gradients


class _Choice(torch.autograd.Function):
    """The gradient of the one-hot is that of the probabilities."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor | None, c: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        *weights, lowest = rest
        choice, next_h, next_c, kept = _ops().gate_choice(x, h, c, *weights, lowest)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, h, c, next_h, kept, *weights)
        return choice, next_h, next_c

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        _, h, c, *_ = ctx.saved_tensors
        of_x, of_h, of_c, *of_weights = _ops().gate_choice_errors(*grads, *ctx.saved_tensors)
        return of_x, None if h is None else of_h, None if c is None else of_c, *of_weights, None


def _ops() -> Any:
    return torch.ops.fractrain_fx if torch.compiler.is_compiling() else kernels()


def _embedding_like(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty((len(x), len(w2))), x.new_empty((len(x), len(w1)))


def _embedding_errors_like(g: Tensor, x: Tensor, between: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in (x, *weights))


def _choice_like(x: Tensor, h: Tensor | None, c: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    _, of_h, _, _, of_head, *_ = rest
    options, size = len(of_head), of_h.shape[1]
    return tuple(x.new_empty((len(x), columns)) for columns in (options, size, size, 5 * size + options))


def _choice_errors_like(*arguments: Any) -> list[Tensor]:
    _, _, _, x, _, _, next_h, _, *weights = arguments
    return [tensor.new_empty(tensor.shape) for tensor in (x, next_h, next_h, *weights)]


_known_to_compiler = known_to_compiler(
    {
        "gate_embedding": _embedding_like,
        "gate_embedding_errors": _embedding_errors_like,
        "gate_choice": _choice_like,
        "gate_choice_errors": _choice_errors_like,
    }
)
