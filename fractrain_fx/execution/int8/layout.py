"""A contraction with a weight as one product of two matrices: which values make up a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from jaxtyping import Shaped
from torch import Tensor

from fractrain_fx.execution.simulated.arithmetic import summed_to
from fractrain_fx.nn.batch_axis import BatchAxis

__all__ = ["Features", "Images", "Layout", "Matrix", "Patches"]

Matrix = Shaped[Tensor, "rows columns"]


class Layout(Protocol):
    """The operands of a contraction as matrices: ``rows(x) @ columns(w).T``, and the way back."""

    def misfit(self, x: Sequence[int], w: Sequence[int], samples: Sequence[BatchAxis]) -> str | None:
        """The reason these shapes cannot become matrices whose rows each belong to one sample; ``None`` if they can.

        ``samples`` says where the samples lie in the operands whose samples have bits of their own.
        """
        ...

    def rows(self, x: Tensor) -> Matrix:
        """The activation: one row for each row of the output."""
        ...

    def code_rows(self, codes: Tensor, bits: Tensor) -> Matrix:
        """The rows of the activation's codes; ``bits`` are those of all samples or of each."""
        ...

    def each(self, value: Tensor, shape: Sequence[int], rows: int) -> Shaped[Tensor, " rows"]:
        """One value for each row. ``value`` has one for each sample and broadcasts against an operand of ``shape``."""
        ...

    def columns(self, w: Tensor) -> Matrix:
        """The weight: one row for each output channel."""
        ...

    def output(self, y: Matrix, x: Tensor) -> Tensor:
        """The output for the activation ``x``, in the memory order of the contraction's own result."""
        ...

    def output_rows(self, g: Tensor) -> Matrix:
        """The rows of the output's gradient."""
        ...

    def activation(self, rows: Matrix, g: Tensor) -> Tensor:
        """The gradient of the activation, from its rows; ``g`` is the output's gradient."""
        ...

    def weight(self, columns: Matrix, w: Tensor) -> Tensor:
        """The gradient of the weight ``w``, from its matrix."""
        ...

    def added(self, g: Tensor, added: Tensor) -> Tensor:
        """The gradient of the term that was added to the product."""
        ...


@dataclass(frozen=True)
class Features:
    """``x @ w.T`` over the last dimension of ``x``.

    Attributes:
        upright: whether the weight is stored for ``x @ w``: one row for each value that is summed over.
    """

    upright: bool = False

    def misfit(self, x: Sequence[int], w: Sequence[int], samples: Sequence[BatchAxis]) -> str | None:
        fits = len(w) == 2 and all(axis.whole or axis.axis < len(x) - 1 for axis in samples)
        return None if fits else _no_matrices(x, w)

    def rows(self, x: Tensor) -> Matrix:
        return x.reshape(-1, x.shape[-1])

    def code_rows(self, codes: Tensor, bits: Tensor) -> Matrix:
        return self.rows(codes)

    def each(self, value: Tensor, shape: Sequence[int], rows: int) -> Shaped[Tensor, " rows"]:
        return value.expand(*shape[:-1], 1).reshape(-1)

    def columns(self, w: Tensor) -> Matrix:
        return w.t() if self.upright else w

    def output(self, y: Matrix, x: Tensor) -> Tensor:
        return y.view(*x.shape[:-1], y.shape[1])

    def output_rows(self, g: Tensor) -> Matrix:
        return self.rows(g)

    def activation(self, rows: Matrix, g: Tensor) -> Tensor:
        return rows.view(*g.shape[:-1], rows.shape[1])

    def weight(self, columns: Matrix, w: Tensor) -> Tensor:
        return columns.t().contiguous() if self.upright else columns

    def added(self, g: Tensor, added: Tensor) -> Tensor:
        return summed_to(g, added.shape)


class Images:
    """Methods of all convolutions over ``(batch, channels, *places)``; each place of the output is a row."""

    def misfit(self, x: Sequence[int], w: Sequence[int], samples: Sequence[BatchAxis]) -> str | None:
        batched = len(x) == len(w) and all(axis.whole or axis.axis == 0 for axis in samples)
        return None if batched else _no_matrices(x, w)

    def each(self, value: Tensor, shape: Sequence[int], rows: int) -> Shaped[Tensor, " rows"]:
        value = value.flatten()
        return value.repeat_interleave(rows // len(value))

    def output_rows(self, g: Tensor) -> Matrix:
        return g.movedim(1, -1).reshape(-1, g.shape[1])

    def images(self, rows: Matrix, places: Sequence[int], like: Tensor) -> Tensor:
        """A tensor from its rows, in the memory order of ``like``; ``places`` are its sizes without the channels."""
        out = rows.view(*places, rows.shape[1]).movedim(-1, 1)
        return out.contiguous() if like.is_contiguous() else out

    def added(self, g: Tensor, added: Tensor) -> Tensor:
        return g.sum([0, *range(2, g.ndim)])


@dataclass(frozen=True)
class Patches(Images):
    """A convolution whose kernels lie side by side: each value of the input is under exactly one of them.

    Attributes:
        kernel: its spatial sizes, which are its strides too.
    """

    kernel: tuple[int, ...]

    def misfit(self, x: Sequence[int], w: Sequence[int], samples: Sequence[BatchAxis]) -> str | None:
        divided = all(size % side == 0 for size, side in zip(x[2:], self.kernel, strict=False))
        return super().misfit(x, w, samples) if divided else _no_matrices(x, w)

    def rows(self, x: Tensor) -> Matrix:
        sides = [each for size, side in zip(x.shape[2:], self.kernel, strict=True) for each in (size // side, side)]
        split = x.reshape(*x.shape[:2], *sides)
        places = split.permute(0, *range(2, split.ndim, 2), 1, *range(3, split.ndim, 2))
        return places.reshape(-1, x.shape[1] * prod(self.kernel))

    def code_rows(self, codes: Tensor, bits: Tensor) -> Matrix:
        return self.rows(codes)

    def columns(self, w: Tensor) -> Matrix:
        return w.flatten(1)

    def output(self, y: Matrix, x: Tensor) -> Tensor:
        places = [size // side for size, side in zip(x.shape[2:], self.kernel, strict=True)]
        return self.images(y, (len(x), *places), x)

    def activation(self, rows: Matrix, g: Tensor) -> Tensor:
        dims = len(self.kernel)
        split = rows.view(g.shape[0], *g.shape[2:], -1, *self.kernel)
        pairs = [each for place in range(1, dims + 1) for each in (place, dims + 1 + place)]
        sizes = [place * side for place, side in zip(g.shape[2:], self.kernel, strict=True)]
        return split.permute(0, dims + 1, *pairs).reshape(g.shape[0], -1, *sizes)

    def weight(self, columns: Matrix, w: Tensor) -> Tensor:
        return columns.view(w.shape)


def _no_matrices(x: Sequence[int], w: Sequence[int]) -> str:
    return f"an input of {tuple(x)} and a weight of {tuple(w)} cannot be multiplied as two matrices"
