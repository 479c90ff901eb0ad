"""Which family an operator's time goes to, from its name and the package's functions above it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from benchmarks import profile
from benchmarks.profile import GATE_GRADIENT, GATES, NOISE, PRODUCTS, RANGES, REST, ROUNDING, by_family, family, where
from benchmarks.step.methods import parse, prepare


@dataclass
class Node:
    name: str
    duration_time_ns: int = 0
    children: list[Node] = field(default_factory=list)


@pytest.mark.parametrize(
    ("operator", "frames", "expected"),
    [
        ("aten::convolution_backward", (), PRODUCTS),
        ("aten::mul", (), REST),
        ("aten::round_", ("formats/affine/format.py: _FakeQuantize.forward",), ROUNDING),
        ("aten::amin", ("nn/quantizers.py: ActivationQuantizer.forward", "formats/affine/format.py: measure"), RANGES),
        ("aten::add_", ("formats/affine/format.py: _FakeQuantize.forward", "formats/noise.py: add_dither"), NOISE),
        ("aten::mul", ("nn/quantizers.py: _GateGradient.backward", "formats/affine/format.py: measure"), GATE_GRADIENT),
        ("aten::addmm", ("nn/gates.py: Controller.forward",), GATES),
        ("aten::addmm", ("nn/anything.py: Fused.forward",), PRODUCTS),
    ],
)
def test_the_function_decides_before_the_operator(operator: str, frames: tuple[str, ...], expected: str) -> None:
    assert family(operator, frames) == expected


def test_time_inside_an_inner_operator_is_not_counted_twice() -> None:
    tree = Node("aten::linear", 10, [Node("python", 9, [Node("aten::addmm", 6), Node("aten::copy_", 1)])])
    assert by_family([Node("a step", 20, [tree, Node("aten::relu", 4)])]) == {PRODUCTS: 9, REST: 5}


def test_functions_are_found_with_their_class_in_a_real_step() -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    step = prepare(parse("dfq"), model, torch.randn(7, 6), torch.randn(7, 6), nn.functional.mse_loss)
    wall, spent = where(step, repeats=1)
    assert wall > 0 and set(spent) == set(profile.FAMILIES)
    for each in (PRODUCTS, ROUNDING, RANGES, NOISE, GATE_GRADIENT, GATES):
        assert spent[each] > 0, each
