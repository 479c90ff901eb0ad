"""The contractions with a weight that C++ kernels compute on codes: matrices, and convolutions of images.

A rounded value is ``scale * code + zero`` with an integer code. So a product of rounded values is a product of codes,
summed in 32 bits, plus corrections of rank 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from fractrain_fx.execution.arithmetic import Bound, summed_to
from fractrain_fx.execution.plan import Plan
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.native import kernels

__all__ = ["Codes", "Convolved", "Features", "Layout"]

# The sum of more products of two bytes than this may not fit into 32 bits.
_LONGEST = 1 << 17


class Codes(NamedTuple):
    """Values ``scale * code + zero``.

    Attributes:
        codes: 8-bit codes; a gradient's may have 16 bits.
        scale: one for all codes, for each row, or for each of several equal runs of rows. For images a row is an image;
            a weight has one scale for each output channel.
        zero: one for each scale.
    """

    codes: Int[Tensor, "rows ..."]
    scale: Float[Tensor, "*runs"]
    zero: Float[Tensor, "*runs"]


class Layout(Protocol):
    """The operands of a contraction as rows, its products on codes, and the same products in float for some rows."""

    def refuses(self, x: Sequence[int], w: Sequence[int], samples: Sequence[BatchAxis]) -> str | None:
        """The reason why operands of these shapes cannot be multiplied as rows of samples; ``None`` if they can.

        ``samples`` says where the samples lie in the operands whose samples have bits of their own.
        """
        ...

    def rows(self, x: Tensor) -> Shaped[Tensor, "rows ..."]:
        """An activation, or an output's gradient, as rows."""
        ...

    def columns(self, w: Tensor) -> Shaped[Tensor, "outputs ..."]:
        """The weight: one row for each output channel."""
        ...

    def each(self, value: Tensor, shape: Sequence[int], rows: int) -> Shaped[Tensor, " rows"]:
        """One value for each row. ``value`` has one for each sample and broadcasts against an operand of ``shape``."""
        ...

    def shaped(self, rows: Tensor, like: Tensor) -> Tensor:
        """The output from its rows, or the gradient of an activation; ``like`` is the activation."""
        ...

    def output(self, x: Codes, w: Codes, bias: Tensor | None) -> Float[Tensor, "rows ..."]:
        """The rows of the output."""
        ...

    def errors(self, g: Codes | Tensor, w: Codes, x: Sequence[int]) -> Float[Tensor, "rows ..."]:
        """The rows of the gradient of an activation of shape ``x``, from codes of the output's gradient or its values.

        The rows of the weight are summed over. So its scales are multiplied into the gradient, which is then rounded to
        16-bit fixed-point numbers, with one unit for each row. Nothing else is rounded but in float32.
        """
        ...

    def weight(self, g: Codes, x: Codes, w: Tensor) -> tuple[Tensor, Float[Tensor, " outputs"]]:
        """The gradients of the weight, in the order of ``w`` in memory, and of a bias. Rows of scale 0 are left out."""
        ...

    def bad(self, plan: Plan, x: Tensor) -> Tensor | None:
        """NaN for each value of the output that a NaN or infinite value enters, else 0; ``None`` if all are 0."""
        ...

    def some_output(self, plan: Plan, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """In float, the rows of the output for some rows of the activation and the rounded weight."""
        ...

    def some_weight(self, plan: Plan, g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """In float, what :meth:`weight` gives for some rows."""
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

    def refuses(self, x: Sequence[int], w: Sequence[int], samples: Sequence[BatchAxis]) -> str | None:
        fits = len(w) == 2 and all(axis.whole or axis.axis < len(x) - 1 for axis in samples)
        return None if fits else _not_rows(x, w)

    def rows(self, x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[-1])

    def columns(self, w: Tensor) -> Tensor:
        return w.t() if self.upright else w

    def each(self, value: Tensor, shape: Sequence[int], rows: int) -> Tensor:
        return value.expand(*shape[:-1], 1).reshape(-1)

    def shaped(self, rows: Tensor, like: Tensor) -> Tensor:
        return rows.view(*like.shape[:-1], rows.shape[1])

    def output(self, x: Codes, w: Codes, bias: Tensor | None) -> Tensor:
        y: Tensor = kernels().code_product(*x, w.codes.t(), w.scale, w.zero, None, bias)
        return y

    def errors(self, g: Codes | Tensor, w: Codes, x: Sequence[int]) -> Tensor:
        errors: Tensor = kernels().error_product(*_with_ends(g), *w)
        return errors

    def weight(self, g: Codes, x: Codes, w: Tensor) -> tuple[Tensor, Tensor]:
        of_weight, of_bias = kernels().code_product_of_rows(*g, *x)
        return self._upright(of_weight), of_bias

    def bad(self, plan: Plan, x: Tensor) -> Tensor | None:
        rows = self.rows(x)
        bad = (rows.amax(1).mul_(0) + rows.amin(1).mul_(0)).unsqueeze(1)
        return bad if bad.isnan().any() else None

    def some_output(self, plan: Plan, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.columns(w), bias)

    def some_weight(self, plan: Plan, g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return self._upright(g.t().mm(x)), g.sum(0)

    def added(self, g: Tensor, added: Tensor) -> Tensor:
        return summed_to(g, added.shape)

    def _upright(self, columns: Tensor) -> Tensor:
        return columns.t().contiguous() if self.upright else columns


@dataclass(frozen=True)
class Convolved:
    """A convolution of images. The kernels read the codes under a kernel where they lie (no im2col).

    Attributes:
        kernel, stride, padding, dilation: its spatial sizes.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def refuses(self, x: Sequence[int], w: Sequence[int], samples: Sequence[BatchAxis]) -> str | None:
        if torch.Size(w[1:]).numel() > _LONGEST:
            return f"its kernels hold more than {_LONGEST:,} values"
        batched = len(x) == len(w) and all(axis.whole or axis.axis == 0 for axis in samples)
        return None if batched else _not_rows(x, w)

    def rows(self, x: Tensor) -> Tensor:
        return x

    def columns(self, w: Tensor) -> Tensor:
        return w

    def each(self, value: Tensor, shape: Sequence[int], rows: int) -> Tensor:
        value = value.flatten()
        return value.repeat_interleave(rows // len(value))

    def shaped(self, rows: Tensor, like: Tensor) -> Tensor:
        return rows

    def output(self, x: Codes, w: Codes, bias: Tensor | None) -> Tensor:
        y: Tensor = kernels().code_convolution(*x, *w, bias, *self._sizes)
        return y

    def errors(self, g: Codes | Tensor, w: Codes, x: Sequence[int]) -> Tensor:
        errors: Tensor = kernels().code_convolution_errors(*_with_ends(g), *w, x[2:], *self._sizes)
        return errors

    def weight(self, g: Codes, x: Codes, w: Tensor) -> tuple[Tensor, Tensor]:
        innermost = not w.is_contiguous()
        of_weight, of_bias = kernels().code_convolution_weight(*g, *x, self.kernel, *self._sizes, innermost)
        return of_weight, of_bias

    def bad(self, plan: Plan, x: Tensor) -> Tensor | None:
        bad = x.amax(1, keepdim=True).mul_(0) + x.amin(1, keepdim=True).mul_(0)
        if not bad.isnan().any():
            return None
        ones = bad.new_ones(1, 1, *self.kernel)
        return plan.arithmetic.forward(Bound(bad, ones, None, plan.static))

    def some_output(self, plan: Plan, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return plan.arithmetic.forward(Bound(x, w, bias, plan.static))

    def some_weight(self, plan: Plan, g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        of_weight = plan.arithmetic.backward(g, Bound(x, w, None, plan.static), (False, True, False))[1]
        assert of_weight is not None
        return of_weight, g.sum([0, *range(2, g.ndim)])

    def added(self, g: Tensor, added: Tensor) -> Tensor:
        return g.sum([0, *range(2, g.ndim)])

    @property
    def _sizes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return self.stride, self.padding, self.dilation


def _with_ends(g: Tensor | Codes) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A gradient as the kernels take it: codes with their scales and zeros, or values without."""
    return g if isinstance(g, Codes) else (g, None, None)


def _not_rows(x: Sequence[int], w: Sequence[int]) -> str:
    return f"an input of {tuple(x)} and a weight of {tuple(w)} cannot be multiplied as rows of samples"
