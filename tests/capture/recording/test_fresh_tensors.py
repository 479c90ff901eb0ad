"""Tensors that forward makes from arrays of numpy are new ones at every call; those of global variables stay one."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import FracConfig, fractrainify

ROWS = torch.linspace(-1, 1, 12).reshape(3, 4)
GLOBAL_ARRAY, GLOBAL_TENSOR = np.zeros(2), torch.zeros(2)

MADE: dict[str, Callable[[], Tensor]] = {
    "from_numpy": lambda: torch.from_numpy(np.zeros(2)),
    "a part": lambda: torch.from_numpy(np.zeros((2, 2)))[0],
    "as_tensor": lambda: torch.as_tensor(np.array([1.0, 2.0])),
    "asarray": lambda: torch.asarray(array("f", [1.0])).view(-1),
    "frombuffer": lambda: torch.frombuffer(bytearray(8), dtype=torch.float32),
    "an old constructor": lambda: torch.FloatTensor([1.0, 2.0]),
    "a written one": lambda: torch.as_tensor(np.zeros(2)).add_(1.0),
}
HELD: dict[str, Callable[[], Tensor]] = {
    "a global array": lambda: torch.from_numpy(GLOBAL_ARRAY),
    "a global tensor": lambda: GLOBAL_TENSOR,
}


class Returns(nn.Module):
    def __init__(self, make: Callable[[], Tensor], training_only: bool = False) -> None:
        super().__init__()
        self.layer, self.make, self.training_only = nn.Linear(4, 4), make, training_only

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y, y if self.training_only and not self.training else self.make()


def _second(model: nn.Module) -> tuple[Tensor, Tensor]:
    """The made tensor of a call, and that of the next one after the caller has changed it."""
    made = model(ROWS)[1]
    before = made.clone()
    made.add_(5)
    return before, model(ROWS)[1]


@pytest.mark.parametrize("training_only", [False, True])
@pytest.mark.parametrize("way", MADE)
def test_a_returned_tensor_is_made_anew_at_every_call(way: str, training_only: bool) -> None:
    original = Returns(MADE[way], training_only)
    expected = original(ROWS)[1]
    model = fractrainify(original, config=FracConfig(method="float"), example_inputs=(ROWS,))
    before, after = _second(model)
    torch.testing.assert_close(before, expected, rtol=0, atol=0)  # constants, which nothing computes
    torch.testing.assert_close(after, expected, rtol=0, atol=0)


@pytest.mark.parametrize("way", HELD)
def test_a_returned_global_variable_stays_one(way: str) -> None:
    model = fractrainify(Returns(HELD[way]), config=FracConfig(method="float"), example_inputs=(ROWS,))
    before, after = _second(model)
    torch.testing.assert_close(after, before + 5, rtol=0, atol=0)
