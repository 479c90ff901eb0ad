"""The quantizing modules: what they round, which ranges they keep, and which gradients flow."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from fractrain_fx.formats import Format, ValueRange, dorefa, get_format, noise
from fractrain_fx.formats.affine import fake_quantize, measure
from fractrain_fx.formats.affine import rounding as affine_rounding
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.nn.quantizers import (
    ActivationQuantizer,
    GradientQuantizer,
    MixedActivationQuantizer,
    MixedGradientQuantizer,
    WeightQuantizer,
)

AFFINE = get_format("affine")
FORWARD = (0, 2, 3, 4, 4, 6, 32)
BACKWARD = (0, 6, 6, 6, 12, 8, 32)
AXES = [BatchAxis(axis, factor, major) for axis in (0, 1, 2) for factor, major in ((1, True), (2, True), (2, False))]


def batch(axis: BatchAxis) -> Tensor:
    """Seven samples, one for each option, laid out as ``axis`` says."""
    shape = [3, 4, 5]
    shape[axis.axis] = len(FORWARD) * axis.factor
    return torch.randn(shape)


def one_hot(*picks: int) -> Tensor:
    return F.one_hot(torch.tensor(picks), len(FORWARD)).float()


class TestActivationQuantizer:
    def test_training_uses_the_range_of_the_batch(self) -> None:
        quantizer = ActivationQuantizer(AFFINE)
        for _ in range(2):
            x = torch.randn(4, 5)
            # In fewer passes than the formula's terms: off by the last bit.
            torch.testing.assert_close(quantizer(x, torch.tensor(3)), fake_quantize(x, 3), rtol=1e-6, atol=1e-6)

    def test_the_running_range_starts_from_the_first_batch_and_moves_by_keep(self) -> None:
        quantizer = ActivationQuantizer(AFFINE, keep=0.75)
        assert not quantizer.range.seen
        quantizer(torch.tensor([1.0, 5.0]), torch.tensor(4))
        assert quantizer.range.seen and (float(quantizer.range.lo), float(quantizer.range.span)) == (1.0, 4.0)
        quantizer(torch.tensor([-3.0, 5.0]), torch.tensor(4))
        assert (quantizer.range.lo.item(), quantizer.range.span.item()) == (0.75 * 1 - 0.25 * 3, 0.75 * 4 + 0.25 * 8)

    def test_evaluation_uses_the_running_range_and_keeps_it(self) -> None:
        quantizer = ActivationQuantizer(AFFINE)
        quantizer(torch.tensor([0.0, 3.0]), torch.tensor(2))
        quantizer.eval()
        assert quantizer(torch.tensor([-5.0, 1.2, 9.0]), torch.tensor(2)).tolist() == [0.0, 1.0, 3.0]
        assert (float(quantizer.range.lo), float(quantizer.range.span)) == (0.0, 3.0)

    @pytest.mark.parametrize("bad", [torch.tensor([0.0, torch.nan]), torch.tensor([-torch.inf, 1.0]), torch.empty(0)])
    def test_a_batch_without_a_finite_range_leaves_the_running_range(self, bad: Tensor) -> None:
        quantizer = ActivationQuantizer(AFFINE)
        rounded = quantizer(bad, torch.tensor(4))
        assert not quantizer.range.seen and not rounded.isfinite().any()
        quantizer(torch.tensor([1.0, 3.0]), torch.tensor(4))
        quantizer(bad, torch.tensor(4))
        assert (float(quantizer.range.lo), float(quantizer.range.span)) == (1.0, 2.0)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_ranges_stay_float32_whatever_the_input(self, dtype: torch.dtype) -> None:
        quantizer = ActivationQuantizer(AFFINE)
        x = torch.randn(8, dtype=dtype)
        for mode in (True, False):
            assert quantizer.train(mode)(x, torch.tensor(4)).dtype == dtype
        assert quantizer.range.lo.dtype == quantizer.range.span.dtype == torch.float32
        assert quantizer.range.lo == x.min().float()

    def test_a_range_beyond_float32_is_refused(self) -> None:
        quantizer = ActivationQuantizer(AFFINE)
        quantizer(torch.tensor([0.0, 1e300], dtype=torch.float64), torch.tensor(4))
        assert not quantizer.range.seen

    def test_the_running_range_is_saved(self) -> None:
        quantizer = ActivationQuantizer(AFFINE)
        quantizer(torch.tensor([1.0, 5.0]), torch.tensor(4))
        other = ActivationQuantizer(AFFINE)
        other.load_state_dict(quantizer.state_dict())
        assert set(quantizer.state_dict()) == {"range.lo", "range.span", "range.seen"}
        assert other.range.seen and (float(other.range.lo), float(other.range.span)) == (1.0, 4.0)

    def test_gradients_pass_straight_through(self) -> None:
        quantizer = ActivationQuantizer(AFFINE)
        x, upstream = torch.randn(4, 5, requires_grad=True), torch.randn(4, 5)
        for mode in (True, False):
            quantizer.train(mode)
            assert torch.equal(torch.autograd.grad(quantizer(3 * x, torch.tensor(3)), x, upstream)[0], 3 * upstream)


class TestMixedActivationQuantizer:
    @pytest.mark.parametrize("axis", AXES, ids=str)
    @pytest.mark.parametrize("training", [True, False])
    def test_each_sample_has_the_bits_of_its_option_over_one_range(self, axis: BatchAxis, training: bool) -> None:
        quantizer = MixedActivationQuantizer(AFFINE, FORWARD, axis)
        quantizer.range.lo.fill_(-2.0)
        quantizer.range.span.fill_(4.0)
        x = batch(axis)
        rounded = quantizer.train(training)(x, one_hot(*range(7)))
        lo, span, _ = measure(x) if training else ValueRange(torch.tensor(-2.0), torch.tensor(4.0))
        of_sample = zip(FORWARD, axis.samples_first(x), axis.samples_first(rounded), strict=True)
        for bits, before, after in of_sample:
            assert torch.equal(after, fake_quantize(before, bits, lo=lo, span=span))

    @pytest.mark.parametrize("axis", AXES, ids=str)
    @pytest.mark.parametrize("training", [True, False])
    def test_the_gate_gradient_is_that_of_the_sum_over_options(self, axis: BatchAxis, training: bool) -> None:
        quantizer = MixedActivationQuantizer(AFFINE, FORWARD, axis)
        x = batch(axis).requires_grad_()
        quantizer(x, one_hot(*range(7)))
        choice = one_hot(3, 0, 6, 1, 2, 5, 4).requires_grad_()
        upstream = torch.randn_like(x)
        grads = torch.autograd.grad(quantizer.train(training)(x, choice), (x, choice), upstream)

        lo, span = (quantizer.range.lo, quantizer.range.span)
        errors = [fake_quantize(x.detach(), bits, lo=lo, span=span) - x.detach() for bits in FORWARD]
        naive = choice.detach().requires_grad_()
        mixed = x.detach() + sum(
            axis.expand(naive[:, k], x.shape) * error for k, error in enumerate(errors) if FORWARD[k] not in (0, 32)
        )
        (expected,) = torch.autograd.grad(mixed, naive, upstream)
        torch.testing.assert_close(grads[1], expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(grads[0], upstream)
        assert not grads[1][:, [0, 6]].any(), "skipping and float say nothing here"

    def test_a_straight_through_choice_may_be_off_by_a_rounding(self) -> None:
        quantizer = MixedActivationQuantizer(AFFINE, FORWARD, BatchAxis())
        x = torch.randn(7, 4)
        exact = quantizer(x, one_hot(*range(7)))
        assert torch.equal(quantizer(x, one_hot(*range(7)) * (1 - 2**-23)), exact)

    def test_options_without_any_rounding_change_nothing(self) -> None:
        quantizer = MixedActivationQuantizer(AFFINE, (0, 32), BatchAxis())
        x = torch.randn(2, 4, requires_grad=True)
        choice = torch.eye(2, requires_grad=True)
        out = quantizer(x, choice)
        assert torch.equal(out, x)
        out.sum().backward()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
    def test_gate_gradients_come_in_the_type_of_the_choice(self, dtype: torch.dtype) -> None:
        quantizer = MixedActivationQuantizer(AFFINE, FORWARD, BatchAxis())
        x, choice = torch.randn(7, 50).to(dtype), one_hot(*range(7)).requires_grad_()
        (grad,) = torch.autograd.grad(quantizer(x, choice).sum(), choice)
        naive = torch.stack([(fake_quantize(x, bits) - x.double()).sum() for bits in (2, 3)])
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad[:, 1:3].sum(0).double(), naive.double(), rtol=1e-4, atol=1e-4)


class TestWeightQuantizer:
    @pytest.mark.parametrize("dim", [0, 1])
    def test_each_output_channel_has_its_range_in_both_modes(self, dim: int) -> None:
        w = torch.randn(4, 5, requires_grad=True)
        quantizer = WeightQuantizer(AFFINE, dim)
        for mode in (True, False):
            rounded = quantizer.train(mode)(w, torch.tensor(3))
            assert torch.equal(rounded, fake_quantize(w, 3, dim=dim))
            assert torch.equal(torch.autograd.grad(rounded.sum(), w)[0], torch.ones_like(w))


def gradient_quantizers() -> list[tuple[nn.Module, Tensor]]:
    return [
        (GradientQuantizer(AFFINE), torch.tensor(3)),
        (MixedGradientQuantizer(AFFINE, BACKWARD, BatchAxis()), one_hot(*range(7))),
    ]


class TestBothGradientQuantizers:
    @pytest.mark.parametrize(("quantizer", "bits"), gradient_quantizers())
    def test_the_output_stays_and_is_a_node_of_its_own(self, quantizer: nn.Module, bits: Tensor) -> None:
        y = torch.randn(7, 4, requires_grad=True) * 1
        out = quantizer(y, bits)
        assert torch.equal(out, y) and out.grad_fn is not y.grad_fn

    @pytest.mark.parametrize(("quantizer", "bits"), gradient_quantizers())
    def test_evaluation_is_the_identity_both_ways(self, quantizer: nn.Module, bits: Tensor) -> None:
        y, upstream = torch.randn(7, 4, requires_grad=True), torch.randn(7, 4)
        assert torch.equal(torch.autograd.grad(quantizer.eval()(y, bits), y, upstream)[0], upstream)
        with torch.no_grad():
            assert torch.equal(quantizer.train()(y, bits), y)

    @pytest.mark.parametrize(("quantizer", "bits"), gradient_quantizers())
    def test_an_in_place_activation_may_follow(self, quantizer: nn.Module, bits: Tensor) -> None:
        x = torch.randn(7, 4, requires_grad=True)
        out = F.relu_(quantizer(2 * x, bits))
        out.sum().backward()
        assert torch.equal(out, F.relu(2 * x)) and x.grad is not None and x.grad.isfinite().all()


class TestGradientQuantizer:
    def test_the_gradient_lands_on_its_grid_unbiased(self) -> None:
        y, upstream = torch.randn(50, requires_grad=True), torch.rand(50)
        quantizer = GradientQuantizer(AFFINE)
        lo, span, _ = measure(upstream)
        draws = torch.stack([torch.autograd.grad(quantizer(y, torch.tensor(3)), y, upstream)[0] for _ in range(2000)])
        torch.testing.assert_close(draws, fake_quantize(draws, 3, lo=lo, span=span), rtol=1e-6, atol=1e-6)
        # As in tests/formats: at most half a step off in one draw, six standard deviations.
        assert (draws.mean(0) - upstream).abs().max() < 6 * (span / 7) / (2 * 2000**0.5)

    @pytest.mark.parametrize("value", [0.0, 0.25, -1e-12])
    def test_a_constant_gradient_stays(self, value: float) -> None:
        y = torch.randn(50, requires_grad=True)
        upstream = torch.full((50,), value)
        assert torch.equal(torch.autograd.grad(GradientQuantizer(AFFINE)(y, torch.tensor(6)), y, upstream)[0], upstream)


class TestMixedGradientQuantizer:
    @pytest.mark.parametrize("axis", AXES, ids=str)
    def test_each_sample_has_the_bits_of_its_option(self, axis: BatchAxis) -> None:
        y = batch(axis).requires_grad_()
        upstream = torch.randn_like(y)
        choice = one_hot(*range(7)).requires_grad_()
        out = MixedGradientQuantizer(AFFINE, BACKWARD, axis)(y, choice)
        grad, of_choice = torch.autograd.grad(out, (y, choice), upstream, allow_unused=True)
        assert of_choice is None
        lo, span, _ = measure(upstream)
        rows = zip(BACKWARD, axis.samples_first(upstream), axis.samples_first(grad), strict=True)
        for bits, before, after in rows:
            if bits == 0:
                assert not after.any()
            elif bits == 32:
                assert torch.equal(after, before)
            else:
                assert torch.equal(after, fake_quantize(after, bits, lo=lo, span=span))
                # Stochastic rounding moves a value by less than a step.
                assert (after - before).abs().max() < span / (2**bits - 1) * (1 + 1e-5)

    @pytest.mark.parametrize("scale", [1.0, 1e-12, 0.0])
    def test_skipped_and_float_samples_get_no_noise_from_the_others(self, scale: float) -> None:
        y = torch.randn(6, 40, requires_grad=True)
        upstream = torch.rand(6, 40) * scale + scale  # zero lies off this grid
        upstream[3:5] = 0
        choice = one_hot(0, 0, 1, 0, 6, 6)
        (grad,) = torch.autograd.grad(MixedGradientQuantizer(AFFINE, BACKWARD, BatchAxis())(y, choice), y, upstream)
        assert not grad[[0, 1, 3]].any()
        assert torch.equal(grad[4:], upstream[4:])


class _Layer(nn.Module):
    """One op with its three quantizers, as the quantize pass inserts them, and an in-place activation behind."""

    def __init__(self, gated: bool, fmt: Format) -> None:
        super().__init__()
        axis = BatchAxis()
        self.weight = nn.Parameter(torch.randn(5, 4))
        self.x = MixedActivationQuantizer(fmt, FORWARD, axis) if gated else ActivationQuantizer(fmt)
        self.w = WeightQuantizer(fmt, 0)
        self.g = MixedGradientQuantizer(fmt, BACKWARD, axis) if gated else GradientQuantizer(fmt)

    def forward(self, x: Tensor, bits: Tensor, w_bits: Tensor) -> Tensor:
        seed = torch.tensor(11)
        return self.g(F.linear(self.x(x, bits), self.w(self.weight, w_bits)), bits, seed).relu_()


def uniform(step: int) -> Tensor:
    return torch.tensor((2, 3, 8, 32)[step])


def gated(step: int) -> Tensor:
    return one_hot(*((i + step) % 7 for i in range(7))).requires_grad_()


@pytest.mark.long
@pytest.mark.parametrize("fmt", [AFFINE, get_format("dorefa")])
@pytest.mark.parametrize("bits_of", [uniform, gated])
def test_compiled_steps_equal_eager_ones_and_new_bits_never_recompile(
    fmt: Format, bits_of: Callable[[int], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (affine_rounding, dorefa):  # eager steps draw their noise as compiled ones do
        monkeypatch.setattr(module, "dither", lambda like, seed: noise.hashed(like.numel(), like, seed))
    counter = CompileCounterWithBackend("aot_eager")
    eager = _Layer(bits_of is gated, fmt)
    twin = copy.deepcopy(eager)
    compiled = torch.compile(twin, backend=counter, fullgraph=True)
    for step in range(4):
        data = torch.randn(7, 4)
        results = []
        for model, layer in ((eager, eager), (compiled, twin)):
            torch.manual_seed(step)
            x, bits = data.clone().requires_grad_(), bits_of(step)
            out = model(x, bits, uniform(step))
            out.square().sum().backward()
            results.append(
                [out, x.grad, bits.grad, layer.weight.grad, layer.x.range.lo, layer.x.range.span, layer.x.range.seen]
            )
        for a, b in zip(*results, strict=True):
            # Sums may be taken in another order.
            assert (a is None and b is None) or torch.allclose(a, b, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1
    twin.eval(), eager.eval()
    for step in range(3):
        with torch.no_grad():
            data, bits = torch.randn(7, 4), bits_of(step)
            assert torch.allclose(compiled(data, bits, uniform(step)), eager(data, bits, uniform(step)))
    assert counter.frame_count == 2


def test_ops_of_a_block_share_the_bits_of_its_samples_on_a_device() -> None:
    options = (0, 2, 4)
    first, second, other = (
        MixedActivationQuantizer(AFFINE, widths, BatchAxis()).to("meta") for widths in (options, options, (2, 4, 8))
    )
    choice = torch.empty(5, dtype=torch.int64, device="meta")
    assert first.bits_of(choice) is second.bits_of(choice)
    assert other.bits_of(choice) is not second.bits_of(choice)
    assert first.bits_of(choice) is not first.bits_of(choice.clone())
