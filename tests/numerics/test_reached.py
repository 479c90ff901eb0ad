"""Sensitivities of ops that are not trained, or that the loss does not depend on, and of batches that do not differ."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fractrain_fx import FracConfig, Pin, sensitivity
from fractrain_fx.errors import InputError, ModelError

WIDTHS = (3, 4, 8)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    convolutions = [layer for inputs in (3, 8, 8) for layer in (nn.Conv2d(inputs, 8, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


def images(count: int = 4, samples: int = 16) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(samples, 3, 8, 8), torch.randint(10, (samples,))) for _ in range(count)]


class Heads(nn.Module):
    """Two heads, of which a loss may leave out the second; a part may run without a gradient."""

    def __init__(self, *, without_gradient: bool = False) -> None:
        super().__init__()
        self.first, self.part, self.aside = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.body, self.head, self.second = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.without_gradient = without_gradient

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.set_grad_enabled(not self.without_gradient):
            x = torch.relu(self.part(torch.relu(self.first(x))))
        return self.head(torch.relu(self.body(x))), self.second(torch.relu(self.aside(x)))


def rows() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(4)]


def of_both(outputs: Sequence[Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0], targets) + F.cross_entropy(outputs[1], targets)


def of_one(outputs: Sequence[Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0], targets)


def test_rounding_a_frozen_layer_does_to_the_loss_what_it_does_when_it_is_trained() -> None:
    model, frozen = net(), net()
    frozen[0].requires_grad_(False)
    frozen[2].requires_grad_(False)
    trained, found = (
        sensitivity(each, images(), criterion=F.cross_entropy, precisions=WIDTHS) for each in (model, frozen)
    )
    assert not any(parameter.requires_grad for parameter in frozen[2].parameters())
    for bits in WIDTHS:
        for operand in ("x", "w"):
            assert found.of("2", operand, bits).change == pytest.approx(trained.of("2", operand, bits).change, rel=1e-4)
            assert (found.of("2", operand, bits).change or 0) > 0
        assert found.of("2", "g", bits).noise == 0, "nothing before it is trained"
        assert (found.of("4", "g", bits).noise or 0) > 0
    assert found.of("2", "g", 4).variance is None
    costs = {op.name: op.macs for op in found.ops}
    assert costs["2"][1:] == (0, 0) and costs["4"][1] == 0 < costs["4"][2], "frozen layers have no gradients to pay for"


def test_a_model_that_asks_whether_it_is_frozen_is_measured_as_it_runs() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.body, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.body(torch.relu(self.first(x))))
            return self.last(x if self.body.weight.requires_grad else 2 * x)

    model = Asks()
    model.body.requires_grad_(False)
    found = sensitivity(model, rows(), criterion=F.cross_entropy, precisions=[4])
    assert (found.of("body", "w", 4).change or 0) > 0
    assert found.loss == pytest.approx(sum(F.cross_entropy(model(x), y).item() for x, y in rows()) / 4, rel=1e-5)


@pytest.mark.parametrize("without_gradient", [False, True])
def test_an_op_that_no_gradient_of_the_loss_reaches_is_refused_unless_it_stays_float(without_gradient: bool) -> None:
    model, criterion = Heads(without_gradient=without_gradient), of_both if without_gradient else of_one
    unknown = "part" if without_gradient else "aside"
    with pytest.raises(ModelError, match=rf"reaches '{unknown}',.* pins=\[Pin\('{unknown}', format='float'\)\]"):
        sensitivity(model, rows(), criterion=criterion, precisions=[4])
    config = FracConfig(method="static", pins=[Pin(unknown, format="float")])
    found = sensitivity(model, rows(), criterion=criterion, precisions=[4], config=config)
    assert {op.name for op in found.measured} == {"part", "aside", "body"} - {unknown}


def test_one_batch_four_times_is_refused() -> None:
    with pytest.raises(InputError, match=r"batches 1 and 2 have the same gradient.*give batches of other samples"):
        sensitivity(net(), images(1) * 4, criterion=F.cross_entropy)


def test_the_same_samples_in_another_order_are_refused() -> None:
    ((x, y),) = images(1)
    orders = [torch.randperm(16) for _ in range(4)]
    with pytest.raises(InputError, match="have the same gradient"):
        sensitivity(net(), [(x[order], y[order]) for order in orders], criterion=F.cross_entropy)
