"""Functions and methods in which values decide: one call each, where no gradient flows through them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fractrain_fx import fractrainify
from fractrain_fx.capture import Recording, record


def lengths_of(mask: Tensor) -> Tensor:
    return torch.stack([torch.tensor(float(len(row.nonzero()))) for row in mask])


class Net(nn.Module):
    """Scales each sample by how many of its values are positive: by a method, and by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = 2.0
        self.stem, self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def scale(self, x: Tensor) -> Tensor:
        return torch.tensor([[row[row > 0].numel() / self.unit] for row in x])

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale(x)
        x = self.stem(x) * lengths_of(x > 0)[:, None]
        return self.head(x + self.body(x).relu()) * scale


class Routed(Net):
    """A gradient flows through its method."""

    def scale(self, x: Tensor) -> Tensor:
        return self.stem(x)[:, :1] if x.sum() > 0 else self.stem(x)[:, 1:2]


class Inside(nn.Module):
    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net, self.last = net, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.net(x))


def targets(recording: Recording) -> list[str]:
    nodes = recording.train.graph.nodes
    return [str(getattr(n.target, "__name__", n.target)) for n in nodes if n.op.startswith("call")]


def test_what_values_decide_is_one_call_and_the_rest_is_recorded() -> None:
    recording = record(Inside(Net()), (torch.randn(4, 6),))
    assert recording.leaves == {}
    assert not recording.fixed_batch
    assert "lengths_of" in targets(recording)
    assert "frac.methods.0" in targets(recording)
    assert targets(recording).count("linear") == 4


def test_it_follows_the_values_of_every_batch_and_the_copy_has_its_own() -> None:
    model = Inside(Net())
    recording = record(model, (torch.randn(4, 6),))
    x = torch.randn(7, 6)
    assert torch.equal(recording.train(x), model(x))
    twin = copy.deepcopy(recording.train)
    model.net.unit = 4.0
    assert torch.equal(recording.train(x), model(x))
    assert not torch.equal(twin(x), model(x))
    assert recording.train.state_dict().keys() == model.state_dict().keys()


def test_a_method_with_a_gradient_makes_its_module_whole_instead() -> None:
    recording = record(Inside(Routed()), (torch.randn(4, 6),))
    assert list(recording.leaves) == ["net"]
    assert "frac.methods.0" not in targets(recording)


def test_the_model_can_be_rewritten_and_trained() -> None:
    rewritten = fractrainify(Inside(Net()), example_inputs=(torch.randn(4, 6),))
    rewritten(torch.randn(5, 6)).sum().backward()
    assert all(p.grad is not None for p in rewritten.parameters())
