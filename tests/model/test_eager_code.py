"""In eager mode the graph that runs reads parameters and modules where they lie, and those that are there now."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import FracConfig, RunConfig, fractrainify
from fractrain_fx.errors import InputError


class Net(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a-b": nn.Linear(4, 6), "1": nn.Sequential(nn.ReLU(), nn.Linear(6, 3))})
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.parts["1"](self.parts["a-b"](x * self.weight)) * self.scale


def test_a_call_looks_nothing_up_in_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = (
        fractrainify(Net(), config=FracConfig(method="float"), example_inputs=(torch.randn(2, 4),)),
        torch.randn(2, 4),
    )
    model.eval()(x)
    found, real = [], nn.Module.__getattr__

    def counted(module: nn.Module, name: str) -> Any:
        found.append(name)
        return real(module, name)

    monkeypatch.setattr(nn.Module, "__getattr__", counted)
    model(x)
    assert found == []


def test_parameters_buffers_and_modules_that_take_the_place_of_others_are_read() -> None:
    plain, x = Net(), torch.randn(2, 4)
    model = fractrainify(plain, config=FracConfig(method="float"), example_inputs=(x,)).eval()
    assert torch.equal(model(x), plain(x))
    model.load_state_dict({name: torch.randn_like(value) for name, value in plain.state_dict().items()}, assign=True)
    assert torch.equal(model(x), plain(x))
    plain.scale = torch.randn(3)
    assert torch.equal(model(x), plain(x))
    copied = model.double()
    assert torch.equal(copied(x.double()), plain(x.double()))


def test_an_error_names_the_node_whose_line_it_came_from() -> None:
    model = fractrainify(
        Net(), config=FracConfig(method="float", run=RunConfig(compared_calls=0)), example_inputs=(torch.randn(2, 4),)
    )
    with pytest.raises(InputError, match=r"It failed in node 'mul' of the model's own code"):
        model(torch.randn(2, 5))
