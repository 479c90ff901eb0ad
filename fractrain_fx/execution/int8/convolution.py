"""A convolution on integer codes by C++ kernels, which read the codes under a kernel where they lie (no im2col)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from fractrain_fx.execution.int8.coded_product import Coded
from fractrain_fx.execution.int8.layout import Images, Layout, Patches
from fractrain_fx.execution.int8.products import Codes, with_ends
from fractrain_fx.execution.int8.windows import Windows
from fractrain_fx.execution.simulated.arithmetic import Bound
from fractrain_fx.execution.simulated.strategy import SECOND, Call, Plan
from fractrain_fx.native import kernels
from fractrain_fx.nn.batch_axis import BatchAxis

__all__ = ["CodedConvolution", "Convolved"]

# The sum of more products of two bytes than this may not fit into 32 bits.
_LONGEST = 1 << 17


@dataclass(frozen=True)
class Convolved(Images):
    """A convolution whose operands stay images: a row is an image, and of the weight an output channel.

    Attributes:
        kernel, stride, padding, dilation: its spatial sizes.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def matrices(self) -> Layout | str:
        """The layout as one product of matrices, which ``torch._int_mm`` needs, or the reason why there is none."""
        apart = set(self.dilation) != {1} and max(self.kernel) > 1
        if self.stride == self.kernel and not any(self.padding) and not apart:
            return Patches(self.kernel)
        wide = any(pad >= side for pad, side in zip(self.padding, self.kernel, strict=True))
        if set(self.stride) != {1} or apart or wide:
            sides = "x".join(map(str, self.kernel))
            return (
                f"its {sides} kernels move neither by their own size nor by 1, or are dilated or padded, and only C++ "
                "kernels multiply such convolutions"
            )
        return Windows(self.kernel, self.padding)

    def misfit(self, x: Sequence[int], w: Sequence[int], samples: Sequence[BatchAxis]) -> str | None:
        if torch.Size(w[1:]).numel() > _LONGEST:
            return f"its kernels hold more than {_LONGEST:,} values"
        return super().misfit(x, w, samples)

    def rows(self, x: Tensor) -> Tensor:
        return x

    def code_rows(self, codes: Tensor, bits: Tensor) -> Tensor:
        return codes

    def columns(self, w: Tensor) -> Tensor:
        return w

    def output(self, y: Tensor, x: Tensor) -> Tensor:
        return y

    def output_rows(self, g: Tensor) -> Tensor:
        return g

    def activation(self, rows: Tensor, g: Tensor) -> Tensor:
        return rows

    def weight(self, columns: Tensor, w: Tensor) -> Tensor:
        return columns


@dataclass(frozen=True)
class CodedConvolution(Coded):
    """A convolution of codes. Samples without codes are convolved in float."""

    def _product(self, plan: Plan, call: Call, x: Codes, w: Codes, bias: Tensor | None) -> Tensor:
        y: Tensor = kernels().code_convolution(*x, *w, bias, *self._sizes)
        return y

    def _float_product(self, plan: Plan, call: Call, rows: Tensor, bias: Tensor | None) -> Tensor:
        rounded = plan.second.again(call.b, None, call.of_b, SECOND)
        return plan.arithmetic.forward(Bound(call.a[rows], rounded, bias, plan.static))

    def _bad(self, plan: Plan, a: Tensor) -> Tensor | None:
        bad = a.amax(1, keepdim=True).mul_(0) + a.amin(1, keepdim=True).mul_(0)
        if not bad.isnan().any():
            return None
        ones = bad.new_ones(1, 1, *self._convolved.kernel)
        return plan.arithmetic.forward(Bound(bad, ones, None, plan.static))

    def _errors(self, errors: Tensor | Codes, w: Codes, x: Sequence[int], g: Tensor) -> Tensor:
        found: Tensor = kernels().code_convolution_errors(*with_ends(errors), *w, x[2:], *self._sizes)
        return found

    def _coded_weight(self, g: Codes, x: Codes, w: Tensor) -> tuple[Tensor, Float[Tensor, " outputs"]]:
        innermost = not w.is_contiguous()
        of_weight, of_bias = kernels().code_convolution_weight(*g, *x, self._convolved.kernel, *self._sizes, innermost)
        return of_weight, of_bias

    def _float_weight(self, plan: Plan, call: Call, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        found = plan.arithmetic.backward(g, Bound(x, call.b, None, plan.static), (False, True, False))[1]
        assert found is not None
        return found, g.sum([0, *range(2, g.ndim)])

    @property
    def _convolved(self) -> Convolved:
        assert isinstance(self.layout, Convolved)
        return self.layout

    @property
    def _sizes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return self._convolved.stride, self._convolved.padding, self._convolved.dilation
