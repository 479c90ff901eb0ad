"""Triton kernels measure and round in format ``affine`` on a GPU, and torch multiplies in float."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from fractrain_fx.execution.arithmetic import Bound, Gradients, Needs
from fractrain_fx.execution.plan import Call, Computed, Factor, Kept, Plan, Rounds, contract
from fractrain_fx.execution.rounded import Rounded
from fractrain_fx.formats import ValueRange
from fractrain_fx.formats.affine.format import range_shape
from fractrain_fx.formats.noise import noise_number
from fractrain_fx.formats.scratch import Latest
from fractrain_fx.kernels.triton import has_triton, measure_by_triton, round_by_triton, round_rows_by_triton
from fractrain_fx.nn.rounding import rounded_gradient

if TYPE_CHECKING:
    from fractrain_fx.formats import AffineFormat

__all__ = ["CUDA", "Cuda"]


class Cuda:
    """Rounds by Triton kernels, one launch for each range and each rounding, or for both of a weight."""

    name = "cuda"

    def refuses(self, plan: Plan, call: Call, needs: Needs) -> str | None:
        if not plan.has_kernels("cuda"):
            return "does not round in format 'affine' by Triton kernels (run.backend='cuda')"
        fmt = cast("AffineFormat", plan.fmt)
        if fmt.gradient_grid != "range":
            return "shifts the levels of gradients (affine.gradient_grid='zero')"
        if fmt.by_sample:
            return "has a range for each sample (affine.ranges='sample')"
        if plan.first.frozen is not None or plan.second.frozen is not None:
            return "has a weight that is kept as codes"
        if not (has_triton(call.a) and has_triton(call.b)):
            return "is not an eager call in float32 or a half type on a GPU"
        return None

    def forward(self, plan: Plan, call: Call) -> Computed:
        first, second = _rounded(plan.first, call.a, call.of_a), _rounded(plan.second, call.b, call.of_b)
        out = contract(plan, call, first.values, second.values)
        return out, (first.kept(plan.first, call.a), second.kept(plan.second, call.b))

    def backward(self, plan: Plan, call: Call, g: Tensor, kept: tuple[Kept, Kept], needs: Needs) -> Gradients:
        if call.bits is not None:
            rounded = _gradient(plan, call.bits, call.seed, g) if has_triton(g) else None
            g = rounded_gradient(plan.fmt, g, call.bits, plan.axis, call.seed) if rounded is None else rounded
        # Under autocast the product was computed in a half type, and so are its gradients.
        first = _again(plan.first, call.a, call.of_a, kept[0]).to(g.dtype)
        second = _again(plan.second, call.b, call.of_b, kept[1]).to(g.dtype)
        return plan.arithmetic.backward(g, Bound(first, second, call.added, plan.static), needs)


CUDA = Cuda()

# The latest activation, rounded, for the next op that reads it in the same way, as queries, keys and values do.
_latest = Latest()


def _rounded(factor: Factor, x: Tensor, rounds: Rounds) -> Rounded:
    bits, within = rounds
    if within is None:
        rounded = round_rows_by_triton(x.detach(), bits, factor.channel)
        if rounded is not None:
            return Rounded(*rounded)
        lo, span = measure_by_triton(x.detach(), factor.channel, range_shape(x, factor.channel))
        within = ValueRange(lo, span, True)
    read = bits, within.lo, within.span
    if factor.weight or any(tensor.is_inference() for tensor in read):
        return Rounded(_values(factor, x, bits, within), within)
    how = factor.fmt, factor.axis, within.measured_here, [(id(tensor), tensor._version) for tensor in read]
    latest: tuple[Tensor, Any] | None = _latest.of(x, how)
    if latest is None:
        _latest.drop()
        latest = _values(factor, x, bits, within), read  # kept too, because the ids of lost tensors are given again
        _latest.keep(x, how, latest)
    return Rounded(latest[0], within)


def _values(factor: Factor, x: Tensor, bits: Tensor, within: ValueRange) -> Tensor:
    bits = bits if factor.weight else factor.axis.expand(bits, x.shape)
    values = round_by_triton(x, bits, within)
    if values is None:  # bits or ranges differ along several dimensions
        return factor.fmt.activation(x, bits, within)
    return values


def _gradient(plan: Plan, bits: Tensor, seed: Tensor | None, g: Tensor) -> Tensor | None:
    """The output's gradient, rounded with noise in its own range, and zero at 0 bits."""
    within = ValueRange(*measure_by_triton(g.detach(), None, ()), True)
    axis = plan.axis.of_bits(bits, g.shape)
    noise = noise_number(True, seed)
    return round_by_triton(g, axis.expand(bits, g.shape), within, noise=noise, erase=True)


def _again(factor: Factor, x: Tensor, rounds: Rounds, kept: Kept) -> Tensor:
    """The rounded factor in backward."""
    if kept.values is not None:
        return kept.values
    return _rounded(factor, x, rounds if kept.within is None else Rounds(rounds.bits, kept.within)).values
