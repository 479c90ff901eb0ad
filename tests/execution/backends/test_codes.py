"""A fused op on integer codes gives what it gives in float: output and all gradients, at every width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fractrain_fx.execution.arithmetic import AddMatMul, Arithmetic, Convolution, Linear, MatMul
from fractrain_fx.execution.backends.codes import CodedProducts
from fractrain_fx.execution.codes.encode import encode_gradient
from fractrain_fx.execution.codes.layout import Convolved, Features, Layout
from fractrain_fx.execution.codes.rows import RowBits
from fractrain_fx.execution.codes.timing import Tuner
from fractrain_fx.execution.fused_op import FusedOp
from fractrain_fx.execution.plan import Call, Rounds
from fractrain_fx.formats import ValueRange
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.kernels.formats import AffineByKernels
from fractrain_fx.nn.quantizers import (
    ActivationQuantizer,
    GradientQuantizer,
    MixedActivationQuantizer,
    MixedGradientQuantizer,
    WeightQuantizer,
)
from fractrain_fx.nn.rounding import rounded_gradient
from tests.models import marks
from tests.products import needs_kernels

pytestmark = needs_kernels

# Of the output, and of the gradients of the activation, the weight, what was added, and the choice (which is a sum over
# the gradient of the activation). Largest error over largest value.
_BOUNDS = (1e-5, 1e-4, 1e-5, 1e-5, 2e-4)
_OPTIONS = ((0, 0), (2, 6), (4, 8), (6, 12), (8, 16), (32, 32), (8, 32), (32, 8))

Case = tuple[Arithmetic, tuple[Any, ...], Layout, tuple[int, ...], tuple[int, ...], int, tuple[int, ...] | None]


def _convolution(
    kernel: tuple[int, ...],
    sizes: tuple[int, ...],
    *,
    stride: tuple[int, ...] = (1, 1, 1),
    padding: tuple[int, ...] = (0, 0, 0),
    dilation: tuple[int, ...] = (1, 1, 1),
    channels: tuple[int, int] = (6, 10),
    samples: int = 8,
) -> Case:
    static = tuple(each[: len(kernel)] for each in (stride, padding, dilation))
    shapes = (samples, channels[0], *sizes), (channels[1], channels[0], *kernel)
    none = (0,) * len(kernel)
    return Convolution(kernel), (*static, none, 1), Convolved(kernel, *static), *shapes, 0, (channels[1],)


_CASES: dict[str, Case] = {
    "linear": (Linear(), (), Features(), (32, 24), (20, 24), 0, (20,)),
    "linear of 3 dimensions": (Linear(), (), Features(), (8, 5, 24), (20, 24), 0, None),
    "addmm": (AddMatMul(("input", "mat1", "mat2")), (1, 1), Features(True), (32, 24), (24, 20), 1, (20,)),
    "addmm of a matrix": (
        AddMatMul(("input", "mat1", "mat2")),
        (1, 1),
        Features(True),
        (32, 24),
        (24, 20),
        1,
        (32, 20),
    ),
    "matmul": (MatMul(), (), Features(True), (8, 5, 24), (24, 20), 1, None),
    "conv 1x1": _convolution((1, 1), (4, 4)),
    "patches": _convolution((2, 2), (4, 4), stride=(2, 2)),
    "conv 3x3": _convolution((3, 3), (5, 4), padding=(1, 1)),
    "conv 3x2 with more around one side": _convolution((3, 2), (4, 5), padding=(2, 0)),
    "conv of 1 dimension": _convolution((5,), (9,), padding=(1,)),
    "conv of 3 dimensions": _convolution((2, 3, 1), (3, 4, 2), padding=(0, 1, 0)),
    "a single image": _convolution((3, 3), (5, 4), padding=(1, 1), samples=1),
    "a single channel": _convolution((3, 3), (5, 4), padding=(1, 1), channels=(1, 1)),
    "a single feature": (Linear(), (), Features(), (32, 1), (1, 1), 0, (1,)),
    "conv 1x1 to many channels": _convolution((1, 1), (4, 5), channels=(12, 200)),
    "many odd channels": _convolution((3, 3), (3, 3), padding=(1, 1), channels=(67, 71)),
    "strides": _convolution((3, 3), (6, 5), stride=(2, 3), padding=(1, 1)),
    "a stride beyond the kernel": _convolution((1, 1), (6, 5), stride=(2, 2)),
    "dilated": _convolution((3, 2), (7, 6), padding=(2, 1), dilation=(2, 3)),
    "dilated strides": _convolution((3, 3), (9, 8), stride=(3, 2), padding=(1, 2), dilation=(2, 2)),
    "strides of 3 dimensions": _convolution((2, 3, 1), (4, 5, 3), stride=(1, 2, 2), padding=(1, 1, 0)),
    "a kernel wider than the image": _convolution((5, 3), (2, 1), padding=(4, 3)),
}


_CONVOLUTIONS = [name for name, case in _CASES.items() if isinstance(case[0], Convolution)]
_BITS = [(2, 2, 2), (6, 8, 4), (8, 9, 8), (8, 16, 8), (4, 32, 6)]
_MORE_WIDTHS = {*range(2, 17)} - {2, 4, 8, 9, 16}


def _op(case: Case, quantizers: Sequence[Any], low: bool) -> FusedOp:
    op = FusedOp(case[0], case[1], *quantizers)
    if low:
        op.backends = (CodedProducts("op", case[2], Tuner(always=True)), *op.backends)
    return op


def _results(
    case: Case,
    bits: tuple[int, int, int],
    low: bool,
    choice: Tensor | None = None,
    half: torch.dtype | None = None,
    lowest: float = 0.0,
    last: bool = False,
    slope: float = 1.0,
) -> list[Tensor]:
    """Output and gradients; with a choice each sample has the bits of its own option.

    ``lowest`` bounds the activation, ``last`` puts the channels of images last in memory, and ``slope`` is the size of
    the output's gradients.
    """
    torch.manual_seed(0)
    fmt, axis = AffineByKernels(), BatchAxis()
    weight = WeightQuantizer(fmt, case[5])
    if choice is None:
        quantizers: tuple[Any, ...] = ActivationQuantizer(fmt), weight, GradientQuantizer(fmt)
        controls = (torch.tensor(bits[0]), torch.tensor(bits[2]), torch.tensor(bits[1]))
    else:
        fw, bw = zip(*_OPTIONS, strict=True)
        quantizers = MixedActivationQuantizer(fmt, fw, axis), weight, MixedGradientQuantizer(fmt, bw, axis)
        controls = (choice.argmax(1), torch.tensor(bits[2]), choice.argmax(1))
        choice = choice.clone().requires_grad_()
    op = _op(case, quantizers, low)
    a = torch.randn(case[3]).clamp(min=lowest)
    a = (a.movedim(1, -1).contiguous().movedim(-1, 1) if last else a).requires_grad_()
    b = torch.randn(case[4]).requires_grad_()
    added = None if case[6] is None else torch.randn(case[6]).requires_grad_()
    with torch.autocast("cpu", half, enabled=half is not None):
        out = op(controls, choice, (quantizers[0].range(a), None), torch.tensor(5), a, b, added)
    upstream = slope * torch.randn(out.shape) * torch.rand(len(out), *[1] * (out.ndim - 1)).exp()
    out.backward(upstream.bfloat16().to(out.dtype))
    assert op.used == ("codes" if low else "plain")
    found = [out, *(x if x is None else x.grad for x in (a, b, added, choice))]
    return [torch.zeros(1) if x is None else x for x in found]


def _assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    for ours, theirs, bound in zip(found, wanted, _BOUNDS, strict=True):
        assert ours.shape == theirs.shape and ours.squeeze().stride() == theirs.squeeze().stride()
        assert (ours - theirs).abs().max() <= bound * theirs.abs().max()


@pytest.mark.parametrize("fw", range(2, 9))
@pytest.mark.parametrize("bw", [pytest.param(bw, marks=marks(bw, _MORE_WIDTHS, ())) for bw in range(2, 17)])
def test_every_width_of_a_linear_layer(fw: int, bw: int) -> None:
    case = _CASES["linear"]
    _assert_equal(_results(case, (fw, bw, fw), True), _results(case, (fw, bw, fw), False))


# The other bits of convolutions are in the next test.
@pytest.mark.parametrize(
    ("name", "bits"),
    [(name, bits) for name in _CASES for bits in (_BITS[1:3] if name in _CONVOLUTIONS else _BITS)],
)
def test_every_kind_of_product(name: str, bits: tuple[int, int, int]) -> None:
    _assert_equal(_results(_CASES[name], bits, True), _results(_CASES[name], bits, False))


@pytest.mark.parametrize("name", _CONVOLUTIONS)
@pytest.mark.parametrize("bits", [(2, 2, 2), (6, 8, 4), (8, 8, 8), (8, 16, 8), (4, 32, 6)])
@pytest.mark.parametrize("lowest", [0.0, pytest.param(-0.7, marks=pytest.mark.long), -9.0])
def test_kernels_convolve_codes_of_any_range_stride_and_dilation(
    name: str, bits: tuple[int, int, int], lowest: float
) -> None:
    case = _CASES[name]
    how: dict[str, Any] = {"lowest": lowest, "last": bits[0] == 6 and len(case[3]) > 3}
    _assert_equal(_results(case, bits, True, **how), _results(case, bits, False, **how))


@pytest.mark.parametrize("name", ["strides", "dilated", "many odd channels"])
@pytest.mark.parametrize("options", [range(8), (1, 2, 3, 4, 3, 2, 1, 2), (0, 5, 0, 5, 5, 7, 7, 2)])
def test_kernels_convolve_samples_with_options_of_their_own(name: str, options: Sequence[int]) -> None:
    case, bits = _CASES[name], (0, 0, 6)
    choice = torch.eye(len(_OPTIONS))[list(options)]
    _assert_equal(_results(case, bits, True, choice, lowest=-1.0), _results(case, bits, False, choice, lowest=-1.0))


@pytest.mark.parametrize("name", ["linear", "linear of 3 dimensions", "addmm", "conv 1x1", "patches", "conv 3x3"])
@pytest.mark.parametrize(
    "options", [range(8), (1, 2, 3, 4, 3, 2, 1, 2), (0, 1, 0, 1, 1, 0, 0, 1), (3,) * 8, (0, 5, 0, 5, 5, 7, 7, 2)]
)
def test_samples_with_options_of_their_own(name: str, options: Sequence[int]) -> None:
    """Those that skip, and those at 32 bits, are among them."""
    case = _CASES[name]
    samples = case[3][0]
    choice = torch.eye(len(_OPTIONS))[[options[i % 8] for i in range(samples)]]
    bits = (0, 0, 6)
    _assert_equal(_results(case, bits, True, choice), _results(case, bits, False, choice))


@pytest.mark.parametrize("slope", [1e-4, 1e-5, 1e-6, 1e-7])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["linear", "conv 3x3"])
def test_gradients_so_small_that_not_all_levels_are_in_use(name: str, gated: bool, slope: float) -> None:
    case, bits = _CASES[name], (6, 16, 6)
    choice = torch.eye(len(_OPTIONS))[[i % 8 for i in range(case[3][0])]] if gated else None
    found, wanted = (_results(case, bits, low, choice, slope=slope) for low in (True, False))
    _assert_equal(found, wanted)


@pytest.mark.parametrize("name", ["linear of 3 dimensions", "matmul", "conv 3x3"])
def test_gradients_with_a_range_that_is_too_wide_for_codes_are_those_of_products_in_float(name: str) -> None:
    case, fmt, results = _CASES[name], AffineByKernels(), []
    for low in (False, True):
        torch.manual_seed(0)
        a, b = (torch.randn(shape).mul(0.01).requires_grad_() for shape in case[3:5])
        quantizers = ActivationQuantizer(fmt), WeightQuantizer(fmt, case[5]), GradientQuantizer(fmt)
        op = _op(case, quantizers, low)
        out = op((torch.tensor(8),) * 3, None, (quantizers[0].range(a), None), torch.tensor(5), a, b, None)
        assert op.used == ("codes" if low else "plain")
        out.backward(torch.randn(out.shape).sign() * 1.5e38)
        results.append((a.grad, b.grad))
    for found, wanted in zip(*results, strict=True):
        assert wanted.isfinite().all() and torch.equal(found, wanted)


def test_large_samples_are_rounded_alike() -> None:
    """They are rounded one by one, on grids that differ at ties."""
    case = (Linear(), (), Features(), (8, 700, 48), (12, 48), 0, None)
    choice = torch.eye(len(_OPTIONS))[range(8)]
    bits = (0, 0, 6)
    _assert_equal(_results(case, bits, True, choice), _results(case, bits, False, choice))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["linear", "addmm", "patches", "conv 3x3"])
def test_under_autocast_results_are_those_of_float32(name: str, half: torch.dtype, gated: bool) -> None:
    """But for the type of the output; the simulation's operands are of that type too."""
    case = _CASES[name]
    choice = torch.eye(len(_OPTIONS))[[i % 8 for i in range(case[3][0])]] if gated else None
    found = _results(case, (6, 8, 4), True, choice, half=half)
    out, *grads = _results(case, (6, 8, 4), False, choice)
    assert found[0].dtype == half
    assert (found[0] - out).abs().max() <= torch.finfo(half).eps * out.abs().max()
    _assert_equal([out, *found[1:]], [out, *grads])


@pytest.mark.parametrize("slope", [1.0, 1e-4, 1e-6, 1e-8, 0.0])
@pytest.mark.parametrize("bits", [[7], [9], [16], [0, 6, 12, 32, 16, 8, 3, 0]])
def test_the_rounded_gradient_is_that_of_the_simulation_bit_for_bit(bits: list[int], slope: float) -> None:
    fmt = AffineByKernels()
    op = FusedOp(Linear(), (), ActivationQuantizer(fmt), WeightQuantizer(fmt, 0), GradientQuantizer(fmt))
    g, seed = slope * torch.randn(8, 5, 6), torch.tensor(3)
    rounds = Rounds(torch.tensor(0.0), ValueRange(*torch.zeros(2)))
    widths = torch.tensor(bits) if len(bits) > 1 else torch.tensor(bits[0])
    unread: Any = None
    call = Call(unread, unread, None, rounds, rounds, widths, seed)
    coded = encode_gradient(RowBits(Features(), (8,), tuple(bits)), op.plan, call, g, values=True)
    assert coded is not None and coded[1] is not None
    assert torch.equal(coded[1], rounded_gradient(fmt, g, widths, BatchAxis(), seed))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("training", [True, False])
def test_bad_values_of_images_show(bad: float, training: bool) -> None:
    fmt = AffineByKernels()
    case = _CASES["conv 3x3"]
    results = []
    for low in (False, True):
        quantizers: tuple[Any, ...] = ActivationQuantizer(fmt), WeightQuantizer(fmt, 0), GradientQuantizer(fmt)
        quantizers[0].range(torch.randn(9))
        for each in quantizers:
            each.train(training)
        a = torch.randn(case[3], generator=torch.Generator().manual_seed(0))
        a[1, 3, 2, 2] = bad
        with torch.no_grad():
            ends = quantizers[0].range(a)
            op = _op(case, quantizers, low)
            results.append(
                op((torch.tensor(8),) * 3, None, (ends, None), torch.tensor(1), a, torch.ones(case[4]), None)
            )
    assert torch.equal(results[0].isfinite(), results[1].isfinite())
    assert not results[1][1, :, 1:4, 1:4].isfinite().any() and bool(results[1][0].isfinite().any()) != training


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("training", [True, False])
def test_bad_values_show(bad: float, training: bool) -> None:
    fmt = AffineByKernels()
    quantizers: tuple[Any, ...] = ActivationQuantizer(fmt), WeightQuantizer(fmt, 0), GradientQuantizer(fmt)
    quantizers[0].range(torch.randn(9))
    results = []
    for low in (False, True):
        for each in quantizers:
            each.train(training)
        op = _op(_CASES["linear"], quantizers, low)
        a = torch.randn(4, 24, generator=torch.Generator().manual_seed(0))
        a[1, 3] = bad
        with torch.no_grad():
            ends = quantizers[0].range(a)
            b = torch.ones(20, 24)
            results.append(op((torch.tensor(8),) * 3, None, (ends, None), torch.tensor(1), a, b, None))
    assert torch.equal(results[0].isfinite(), results[1].isfinite())
    assert not results[1][1].isfinite().any() and bool(results[1][0].isfinite().any()) != training
