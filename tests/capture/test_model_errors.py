"""A lack of memory while a model is tried out is passed on: it does not decide what is recorded or compared."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import FracConfig, fractrainify
from fractrain_fx.capture import record
from fractrain_fx.capture.checking.check import find_mismatch, repeated, trials_of
from fractrain_fx.capture.inputs.call import describe_call
from fractrain_fx.capture.state import Snapshot

ERRORS = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory"),
)


CALLS: deque[bool] = deque()
"""Which of the next calls of a norm fail; not an attribute, which every run would put back."""


class Norm(nn.BatchNorm1d):
    """Raises an error for more rows than ``most``, in one mode or both, and at the calls that ``CALLS`` names."""

    def __init__(self, error: Exception, most: int = 100, train: tuple[bool, ...] = (True, False)) -> None:
        super().__init__(4)
        self.error, self.most, self.modes = error, most, train

    def forward(self, input: Tensor) -> Tensor:
        if (CALLS and CALLS.popleft()) or (len(input) > self.most and self.training in self.modes):
            raise self.error
        return super().forward(input)


def hungry(error: Exception, most: int = 100, train: tuple[bool, ...] = (True, False)) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), Norm(error, most, train))


@pytest.mark.parametrize("error", ERRORS, ids=["GPU", "Python", "CPU"])
@pytest.mark.parametrize(
    ("most", "train", "check"),
    [
        (6, (False,), True),  # at twice the samples and one
        (3, (True,), True),  # at one more
        (2, (True, False), True),  # at the example, where no modes and tables were made yet
        (2, (True,), False),  # in the run that is recorded
    ],
)
def test_a_lack_of_memory_at_any_size_is_no_fact_about_the_model(
    error: Exception, most: int, train: tuple[bool, ...], check: bool
) -> None:
    with pytest.raises(type(error)) as told:
        record(hungry(error, most, train), (torch.randn(3, 4),), check=check)
    assert told.value is error


@pytest.mark.parametrize("error", ERRORS, ids=["GPU", "Python", "CPU"])
def test_a_graph_without_memory_does_not_differ_from_its_model(error: Exception) -> None:
    model, x = hungry(error), torch.randn(3, 4)
    recorded, snapshot = record(model, (x,)).train, Snapshot(model)
    (trial, _), _ = trials_of(snapshot, describe_call(model, (x,), {}), 0)
    CALLS.append(True)
    with pytest.raises(type(error)):
        find_mismatch(snapshot, recorded, trial)
    CALLS.extend((False, False, True))  # after two calls of the model
    with pytest.raises(type(error)):
        repeated(snapshot, recorded, trial)


@pytest.mark.parametrize("error", ERRORS, ids=["GPU", "Python", "CPU"])
def test_a_later_call_that_lacks_memory_to_be_compared_says_so(error: Exception) -> None:
    model = fractrainify(hungry(error), config=FracConfig(method="float"), example_inputs=(torch.randn(3, 4),))
    CALLS.append(True)
    with pytest.raises(type(error)) as told:
        model(torch.randn(5, 4))
    assert told.value is error
    assert model(torch.randn(5, 4)).shape == (5, 4)
