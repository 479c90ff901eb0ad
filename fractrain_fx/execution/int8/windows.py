"""A convolution with overlapping kernels, as a product of codes: each place of the output is a row (im2col)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fractrain_fx.execution.int8.layout import Images, Matrix
from fractrain_fx.execution.int8.products import Codes, fixed_point, limb_product
from fractrain_fx.nn.batch_axis import BatchAxis

__all__ = ["Windows", "window_errors"]

# Rows of more values than this, in all, fit into no cache and take longer than the convolution in float.
_MOST = 1 << 26


@dataclass(frozen=True)
class Windows(Images):
    """A convolution at stride 1. A row holds the values under one kernel, channels innermost.

    Attributes:
        kernel: its spatial sizes.
        padding: padding at both ends of each spatial dimension, less than the kernel.
    """

    kernel: tuple[int, ...]
    padding: tuple[int, ...]

    def misfit(self, x: Sequence[int], w: Sequence[int], samples: Sequence[BatchAxis]) -> str | None:
        if prod(x) * prod(self.kernel) > _MOST:
            return f"its kernels overlap, and the rows under them would hold more than {_MOST:,} values"
        return super().misfit(x, w, samples)

    def rows(self, x: Tensor) -> Matrix:
        return _rows(x.movedim(1, -1), self.kernel, self.padding)

    def code_rows(self, codes: Tensor, bits: Tensor) -> Matrix:
        # Padding is 0, which is the lowest code: only ranges that begin at 0 come here.
        lowest = -(1 << (bits.long() - 1).clamp(min=0))
        return _rows(codes.movedim(1, -1), self.kernel, self.padding, lowest)

    def columns(self, w: Tensor) -> Matrix:
        return w.movedim(1, -1).flatten(1)

    def output(self, y: Matrix, x: Tensor) -> Tensor:
        places = zip(x.shape[2:], self.kernel, self.padding, strict=True)
        return self.images(y, (len(x), *(size + 2 * pad - side + 1 for size, side, pad in places)), x)

    def activation(self, rows: Matrix, g: Tensor) -> Tensor:
        places = zip(g.shape[2:], self.kernel, self.padding, strict=True)
        return self.images(rows, (len(g), *(size - 2 * pad + side - 1 for size, side, pad in places)), g)

    def weight(self, columns: Matrix, w: Tensor) -> Tensor:
        found = columns.view(len(w), *self.kernel, -1).movedim(-1, 1)
        return found.contiguous() if w.is_contiguous() else found


def window_errors(
    g: Float[Tensor, "rows outputs"], w: Codes, layout: Windows, shape: Sequence[int]
) -> Float[Tensor, "places inner"]:
    """The gradient of each place of the input, as ``products.error_product`` gives it for other layouts.

    A row holds the gradients of all outputs that a place of the input contributes to, in fixed-point numbers. Each of
    those gradients is in the rows of several places, so all rows of a sample share one unit.

    Args:
        g: rows of the output's gradient.
        w: weight; each row holds the values of a kernel, channels innermost.
        layout: the convolution.
        shape: shape of the output, ``(samples, channels, *places)``.
    """
    samples, outputs, *places = shape
    around = [side - 1 - pad for side, pad in zip(layout.kernel, layout.padding, strict=True)]
    numbers, unit = fixed_point(g, w.scale, samples)
    numbers = numbers.view(samples, *places, outputs)
    # The gradient of the input is a convolution with the flipped kernel.
    turned = w.codes.view(outputs, prod(layout.kernel), -1).flip(1).movedim(0, 1).flatten(0, 1)
    found = limb_product(_rows(numbers, layout.kernel, around), turned)
    offsets = _rows(g.mv(w.zero).view(samples, *places, 1), layout.kernel, around).sum(1)
    units = unit.repeat_interleave(len(found) // samples, dim=0)
    return torch.addcmul(offsets.unsqueeze(1), found, units, out=found)


def _rows(
    x: Tensor, kernel: Sequence[int], padding: Sequence[int], around: Int[Tensor, "*samples"] | None = None
) -> Matrix:
    """The values under the kernel at each place of ``x``, channels last; ``around`` (default 0) pads ``x``."""
    samples, *sizes, channels = x.shape
    wide = [size + 2 * pad for size, pad in zip(sizes, padding, strict=True)]
    padded = x.new_empty(samples, *wide, channels)
    if any(padding):
        padded.copy_(x.new_zeros(()) if around is None else around.reshape(-1, *[1] * (x.ndim - 1)))
    inside = [slice(pad, pad + size) for size, pad in zip(sizes, padding, strict=True)]
    padded[(slice(None), *inside)].copy_(x)
    sample, *steps, channel = padded.stride()
    places = [size - side + 1 for size, side in zip(wide, kernel, strict=True)]
    windows = padded.as_strided((samples, *places, *kernel, channels), (sample, *steps, *steps, channel))
    return windows.reshape(-1, prod(kernel) * channels)
