"""Models on the meta device: recorded from shapes alone, and told apart from what needs values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from fractrain_fx.capture import record
from fractrain_fx.errors import CaptureError, InputError


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if x.sum() > 0 else self.two(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Reads(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


class Lists(Reads):
    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tensor(self.one(x).tolist()))


class Counts(Reads):
    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)[x.sum(1).nonzero()[:, 0]])


def on_meta(kind: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


@pytest.mark.parametrize(("kind", "where"), [(Outer, "'inner'"), (Lists, "Lists itself"), (Counts, "Counts itself")])
def test_reading_a_value_that_is_not_there_names_the_module(kind: type[nn.Module], where: str) -> None:
    with pytest.raises(CaptureError, match=rf"{where}.* reads values, and tensors on the meta device have none"):
        record(on_meta(kind), (torch.randn(2, 4),))


def test_inputs_that_do_not_fit_are_still_the_inputs_fault() -> None:
    with pytest.raises(InputError, match=r"'one'.* rejects the example inputs"):
        record(on_meta(Lists), (torch.randn(2, 5),))


def test_a_model_half_loaded_is_refused() -> None:
    model = on_meta(Reads)
    model.one.to_empty(device="cpu")  # type: ignore[union-attr]
    with pytest.raises(CaptureError, match=r"'two.weight' is on the meta device"):
        record(model, (torch.randn(2, 4),))


def test_fake_tensors_are_sent_to_the_meta_device() -> None:
    with FakeTensorMode():
        model = Outer()
    with pytest.raises(CaptureError, match=r'torch.device\("meta"\)'):
        record(model, (torch.randn(2, 4),))
