"""How far choices depend on the input: information in bits, and configurations counted over batches."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fractrain_fx.engine.dependence import ChoiceMeter, entropy_bits


def one_hot(*options: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(options), 4).float()


def test_entropy_is_in_bits() -> None:
    assert entropy_bits(torch.tensor([5.0, 0.0])) == 0
    assert entropy_bits(torch.tensor([2.0, 2.0, 2.0, 2.0])) == pytest.approx(2)
    assert entropy_bits(torch.tensor([3.0, 1.0])) == pytest.approx(-0.75 * math.log2(0.75) + 0.5)


def test_gates_that_answer_all_samples_alike_tell_nothing_about_them() -> None:
    meter = ChoiceMeter()
    for _ in range(3):
        meter.add({"a": one_hot(1, 1, 1), "b": one_hot(2, 2, 2)})
    found = meter.read()
    assert found is not None
    assert (found.mean_information, found.configurations, found.commonest) == (0, 1, 1)


def test_configurations_are_counted_over_batches_and_information_block_by_block() -> None:
    meter = ChoiceMeter()
    meter.add({"a": one_hot(0, 0), "b": one_hot(1, 2)})
    meter.add({"a": one_hot(0, 3), "b": one_hot(1, 2)})
    found = meter.read()
    assert found is not None
    # Configurations 01, 02, 01, 32.
    assert found.configurations == 3 and found.commonest == 0.5
    assert found.mutual_information == pytest.approx({"a": entropy_bits(torch.tensor([3.0, 1.0])), "b": 1.0})
    assert found.mean_information == pytest.approx(sum(found.mutual_information.values()) / 2)


def test_a_model_without_gates_has_nothing_to_say() -> None:
    meter = ChoiceMeter()
    meter.add({})
    assert meter.read() is None
