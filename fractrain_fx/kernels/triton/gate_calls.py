"""Launches the kernels of gates on tensors: the numbers of the plain operations, up to the order of sums."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fractrain_fx.kernels.triton.fit import on_device

__all__ = [
    "Sizes",
    "choose_by_triton",
    "choose_errors_by_triton",
    "embed_by_triton",
    "embed_errors_by_triton",
    "rows_of",
]

# Factors of a product that a program multiplies at once.
_FACTORS = 8192


class Sizes(NamedTuple):
    """The sizes of a controller: features of an embedding, width of the cell, options."""

    features: int
    hidden: int
    options: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """The sizes rounded up to powers of 2, the shapes that Triton has."""
        return _width(self.features), _width(self.hidden), _width(self.options)

    @property
    def samples(self) -> int:
        """Samples of one program."""
        return _samples(*self.widths)


def _width(size: int) -> int:
    return max(1 << (size - 1).bit_length(), 2)


def _samples(*widths: int) -> int:
    return min(max(_FACTORS // max(widths) ** 2, 1), 16)


def rows_of(x: Tensor, sizes: Sizes) -> int:
    """Programs, and so rows of gradients of the weights, for these samples."""
    return -(-len(x) // sizes.samples)


def embed_by_triton(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> tuple[Tensor, Tensor]:
    """``w2 @ relu(w1 @ x + b1) + b2``, and the values between both layers."""
    from fractrain_fx.kernels.triton.gates import embedded

    out, between = x.new_empty((len(x), len(w2))), x.new_empty((len(x), len(w1)))
    wide = _width(len(w1)), _width(len(w2))
    samples = _samples(*wide)
    with on_device(x):
        embedded[-(-len(x) // samples),](
            *(x, w1, b1, w2, b2, out, between, len(x), x.shape[1], len(w1), len(w2), samples, max(wide)), *wide
        )
    return out, between


def embed_errors_by_triton(
    g: Tensor, x: Tensor, between: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of ``x`` and of both layers."""
    from fractrain_fx.kernels.triton.gates import embedded_errors

    errors = tuple(torch.empty_like(tensor) for tensor in (x, w1, b1, w2, b2))
    wide = _width(len(w1)), _width(len(w2))
    with on_device(x):
        embedded_errors[-(-x.shape[1] // max(wide)),](
            *(g, x, between, w1, w2, *errors, len(x), x.shape[1], len(w1), len(w2), _samples(*wide), max(wide)), *wide
        )
    return errors


def choose_by_triton(
    x: Tensor, h: Tensor | None, c: Tensor | None, packed: Tensor, sizes: Sizes, lowest: int
) -> tuple[Tensor, ...]:
    """The choice, the new state, and what the gradients need (``kernels/triton/gates.py: chosen``)."""
    from fractrain_fx.kernels.triton.gates import chosen

    size, options = sizes.hidden, sizes.options
    outputs = tuple(x.new_empty((len(x), columns)) for columns in (options, size, size, 5 * size + options))
    with on_device(x):
        chosen[rows_of(x, sizes),](
            *(x, x if h is None else h, x if c is None else c, packed, *outputs, len(x), *sizes, lowest),
            *(h is not None, sizes.samples, *sizes.widths),
        )
    return outputs


def choose_errors_by_triton(
    grads: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    x: Tensor,
    h: Tensor | None,
    c: Tensor | None,
    next_h: Tensor,
    kept: Tensor,
    packed: Tensor,
    sizes: Sizes,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """The gradients of ``x``, the embeddings, of the state ``h`` and ``c``, and of the packed weights.

    ``grads`` are those of the choice, of the new state, and of the weights from later steps; ``None``: 0. Without ``h``
    the step began with zeros; ``next_h`` is the state after it; :func:`choose_by_triton` kept ``kept``.
    """
    from fractrain_fx.kernels.triton.gates import chosen_errors

    of_x, to = torch.empty_like(x), x.new_empty(packed.shape)
    of_h, of_c = (None if state is None else torch.empty_like(next_h) for state in (h, c))
    tensors = x, h, c, next_h, kept, packed, of_x, of_h, of_c, to
    with on_device(x):
        chosen_errors[rows_of(x, sizes),](
            *(x if grad is None else grad.contiguous() for grad in grads),
            *(x if tensor is None else tensor for tensor in tensors),
            *(len(x), *sizes, *(tensor is not None for tensor in (*grads, h)), sizes.samples, *sizes.widths),
        )
    return of_x, of_h, of_c, to
