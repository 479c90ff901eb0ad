"""A module kept whole runs on rounded weights and gets its own back."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fractrain_fx import FracModel
from fractrain_fx.formats import get_format
from fractrain_fx.nn.quantized_leaf import QuantizedLeaf
from tests import build


class Watched(nn.Module):
    """Two weights are tied, and one layer is found under two names, as by an updater that refers to its network."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.again = nn.Linear(4, 4), nn.Linear(4, 4)
        self.again.weight = self.net.weight
        self.updater = nn.Module()
        self.updater.net = self.net

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.net(x)) * float(x.detach().abs().max())


def rewritten() -> FracModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Watched(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    return build.rewritten(model, torch.randn(3, 4), method="static")


def test_every_place_of_a_weight_is_rounded_and_every_parameter_is_back_after_the_call() -> None:
    leaf = Watched()
    before = dict(leaf.named_parameters(remove_duplicate=False))
    quantized = QuantizedLeaf(leaf, get_format("affine"))
    x = torch.randn(3, 4)
    rounded = quantized(torch.tensor(2), x)
    assert {name: id(p) for name, p in leaf.named_parameters(remove_duplicate=False)} == {
        name: id(p) for name, p in before.items()
    }
    reference = copy.deepcopy(leaf)
    with torch.no_grad():
        reference.net.weight.copy_(quantized.quantizer(leaf.net.weight, torch.tensor(2)))
    torch.testing.assert_close(rounded, reference(x))


def test_a_model_with_such_a_module_still_has_parameters_to_train_after_a_call() -> None:
    model, x = rewritten(), torch.randn(3, 4)
    names = [name for name, _ in model.named_parameters()]
    model(x).sum().backward()
    assert [name for name, _ in model.named_parameters()] == names
    assert all(isinstance(p, nn.Parameter) and p.grad is not None for p in model.restore().parameters())
    copy.deepcopy(model)(x)


def test_such_a_module_runs_on_tensors_that_the_caller_puts_in_the_place_of_parameters() -> None:
    model, x = rewritten(), torch.randn(3, 4)
    values = {name: p.detach() for name, p in model.named_parameters()}
    with torch.no_grad():
        torch.testing.assert_close(torch.func.functional_call(model, values, (x,)), model(x))
