"""What a quantized op computes, forward and backward, against float64 formulas that call only ``fake_quantize``.

The reference knows nothing of passes and quantizers, so it holds for whatever way the rewritten graph runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fractrain_fx import FracConfig, FracModel, GateConfig, Precision, fractrainify
from fractrain_fx.config import GateGradient
from fractrain_fx.formats.affine import fake_quantize, measure
from tests import build

OPTIONS = tuple(Precision(bits, 32) for bits in (2, 3, 4, 6, 8))


@dataclass(frozen=True)
class Layer:
    """A layer to put between a float first and a float last one, and what it computes from an input and a weight."""

    build: Callable[[], nn.Module]
    apply: Callable[[Tensor, Tensor, Tensor | None], Tensor]


LAYERS = {
    "linear": Layer(lambda: nn.Linear(8, 6), F.linear),
    "conv": Layer(
        lambda: nn.Conv2d(8, 6, 3, stride=2, padding=1, groups=2),
        lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1, groups=2),
    ),
    "conv1d": Layer(lambda: nn.Conv1d(8, 6, 3, dilation=2), lambda x, w, b: F.conv1d(x, w, b, dilation=2)),
}
SHAPES = {"linear": (9, 8), "conv": (5, 8, 6, 6), "conv1d": (5, 8, 9)}


class Ends(nn.Module):
    """A layer between a first and a last one, which stay float, so that its entry and upstream gradient are known."""

    middle: Any

    def __init__(self, kind: str) -> None:
        super().__init__()
        width = SHAPES[kind][1]
        self.first = nn.Linear(4, width)
        self.middle = LAYERS[kind].build()
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.middle(self.head(x)))

    def head(self, x: Tensor) -> Tensor:
        """Features second, where the kind's layer wants them."""
        return self.first(x).movedim(-1, 1)

    def tail(self, y: Tensor) -> Tensor:
        return self.last(y.movedim(1, -1))


def inputs(kind: str) -> Tensor:
    batch, _, *positions = SHAPES[kind]
    return torch.randn(batch, *positions, 4)


def rewritten(kind: str, config: FracConfig) -> tuple[Ends, FracModel, Tensor]:
    model, x = Ends(kind), inputs(kind)
    return model, build.rewritten(model, inputs(kind), config=config).train(), x


def upstream_of(model: Ends, y: Tensor) -> Tensor:
    """The gradient that the sum of squares of the model's output sends to the middle layer's output."""
    y = y.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model.tail(y).square().sum(), y)
    return gradient


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_forward_and_gradients_of_a_scheduled_op_equal_the_formula(kind: str, bits: int) -> None:
    model, frac, x = rewritten(kind, FracConfig(method="static", precision=Precision(bits, 32)))
    output = frac(x)
    output.square().sum().backward()

    entry = model.head(x).detach()
    weight = model.middle.weight.detach()
    x_hat, w_hat = fake_quantize(entry, bits), fake_quantize(weight, bits, dim=0)
    y = LAYERS[kind].apply(x_hat, w_hat, model.middle.bias)
    # In float32 the numbers are those of the plain op on rounded operands, but for the order of its sums.
    torch.testing.assert_close(output, model.tail(y), rtol=1e-5, atol=1e-5)

    # Straight through: the gradients are the op's own, at the rounded operands, in float64.
    xs, ws = x_hat.double().requires_grad_(), w_hat.double().requires_grad_()
    y = LAYERS[kind].apply(xs, ws, model.middle.bias.double())
    dx, dw = torch.autograd.grad(y, (xs, ws), upstream_of(model, y.float()).double())
    torch.testing.assert_close(model.middle.weight.grad.double(), dw, rtol=1e-4, atol=1e-4)
    first = torch.autograd.grad(model.head(x), model.first.weight, dx.float())[0]
    torch.testing.assert_close(model.first.weight.grad, first, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", LAYERS)
def test_rounded_output_gradients_are_unbiased_in_what_they_lead_to(kind: str) -> None:
    model, frac, x = rewritten(kind, FracConfig(method="static", precision=Precision(8, 2)))
    draws = []
    for _ in range(150):
        model.zero_grad()
        frac(x).square().sum().backward()
        draws.append(model.middle.weight.grad.clone())
    drawn = torch.stack(draws)

    entry, weight = model.head(x).detach(), model.middle.weight.detach()
    xs = fake_quantize(entry, 8).double()
    ws = fake_quantize(weight, 8, dim=0).double().requires_grad_()
    y = LAYERS[kind].apply(xs, ws, model.middle.bias.double())
    upstream = upstream_of(model, y.float())
    (expected,) = torch.autograd.grad(y, ws, upstream.double())
    error = (drawn.mean(0) - expected).abs()
    # Six standard deviations of the mean, and what float32 sums leave over.
    assert (error < 6 * drawn.std(0) / len(draws) ** 0.5 + 1e-4 * expected.abs().max()).all()
    assert drawn.std(0).max() > 0, "two bits do not hold this gradient, so there is noise"
    assert not torch.equal(drawn[0], drawn[1]), "each step draws its own"


def test_both_operands_of_a_product_are_rounded_as_activations() -> None:
    class Strategy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.last(h @ h.flip(1).transpose(1, 2))

    model, x = Strategy(), torch.randn(3, 5, 6)
    config = FracConfig(method="static", precision=Precision(4, 32))
    frac = fractrainify(model, config=config, example_inputs=(x,), check=False).train()
    output = frac(x)
    h = model.first(x)
    a, b = fake_quantize(h, 4), fake_quantize(h.flip(1).transpose(1, 2), 4)
    torch.testing.assert_close(output, model.last(a @ b), rtol=1e-5, atol=1e-5)
    mine = torch.autograd.grad(output.square().sum(), model.first.weight)[0]
    by_formula = torch.autograd.grad(model.last(a @ b).square().sum(), model.first.weight)[0]
    torch.testing.assert_close(mine, by_formula, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gradient", get_args(GateGradient))
@pytest.mark.parametrize("kind", LAYERS)
def test_the_gate_gradient_of_a_whole_op_is_the_naive_sum_over_options(kind: str, gradient: GateGradient) -> None:
    config = FracConfig(method="dfq", options=OPTIONS, weight_bits=6, gate=GateConfig(gradient=gradient))
    model, frac, x = rewritten(kind, config)
    output = frac(x)
    (choice,) = frac.cost.choice.values()
    choice.retain_grad()
    output.square().sum().backward()

    entry = model.head(x).detach()
    lo, span, _ = measure(entry)
    picked = choice.detach().argmax(1).tolist()
    rounded = [fake_quantize(entry, option.fw, lo=lo, span=span) for option in OPTIONS]
    x_hat = torch.stack([rounded[k][i] for i, k in enumerate(picked)])
    w_hat = fake_quantize(model.middle.weight.detach(), 6, dim=0)
    y = LAYERS[kind].apply(x_hat, w_hat, model.middle.bias)
    torch.testing.assert_close(output, model.tail(y), rtol=1e-5, atol=1e-5)

    # Mix all options with the choice as weights, and let autograd differentiate that, in float64.
    weights = F.one_hot(torch.tensor(picked), len(OPTIONS)).double().requires_grad_()
    errors = torch.stack([each.double() - entry.double() for each in rounded], dim=1)
    mixed = entry.double() + (weights.view(*weights.shape, *[1] * (entry.ndim - 1)) * errors).sum(1)
    y64 = LAYERS[kind].apply(mixed, w_hat.double(), model.middle.bias.double())
    expected, g = torch.autograd.grad(y64, (weights, mixed), upstream_of(model, y).double())
    if gradient == "fisher":
        expected = len(x) / 2 * (errors * g.unsqueeze(1)).square().flatten(2).sum(2)
    scale = expected.abs().max().item()
    assert choice.grad is not None
    torch.testing.assert_close(choice.grad.double(), expected, rtol=1e-5, atol=1e-5 * scale)
