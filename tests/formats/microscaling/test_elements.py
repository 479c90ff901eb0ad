"""The elements' values, and rounding to them."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from fractrain_fx.formats.microscaling.elements import ELEMENTS, Element, exponents, round_to_grid

an_element = st.sampled_from(sorted(ELEMENTS.values(), key=lambda each: each.name))
numbers = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20)
numbers_in_range = st.lists(st.floats(-6e4, 6e4, width=32), min_size=1, max_size=20)


def values(element: Element) -> Tensor:
    """All values of an element that are not negative, from its definition."""
    if not element.exponent:
        return torch.arange(element.largest + 1, dtype=torch.float64)
    bias, found = 2 ** (element.exponent - 1) - 1, []
    for exponent in range(2**element.exponent):
        for mantissa in range(2**element.mantissa):
            fraction = mantissa / 2**element.mantissa
            found.append(2.0 ** (max(exponent, 1) - bias) * (fraction + (exponent > 0)))
    return torch.tensor([each for each in found if each <= element.largest], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "largest", "smallest", "count"),
    [
        ("e2m1", 6, 1, 8),
        ("e2m3", 7.5, 1, 32),
        ("e3m2", 28, 0.25, 32),
        ("e4m3", 448, 2**-6, 127),
        ("e5m2", 57344, 2**-14, 124),
        ("int4", 7, 8, 8),
        ("int6", 31, 32, 32),
        ("int8", 127, 128, 128),
    ],
)
def test_elements_are_those_of_the_specification(name: str, largest: float, smallest: float, count: int) -> None:
    element = ELEMENTS[name]
    assert (element.largest, element.smallest) == (largest, smallest)
    bits = int(name[3]) if name.startswith("int") else 1 + int(name[1]) + int(name[3])
    assert 2.0**element.top <= largest < 2.0 ** (element.top + 1) and element.bits == bits
    assert len(values(element)) == count


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)
def test_the_values_of_an_element_stay_and_ties_go_to_the_even_one(element: Element) -> None:
    grid = values(element).float()
    assert torch.equal(round_to_grid(grid, element.grid), grid)
    middle = (grid[1:] + grid[:-1]) / 2
    even = torch.arange(len(middle)) % 2  # the value of even number is below an even middle
    assert torch.equal(round_to_grid(middle, element.grid), grid[torch.arange(len(middle)) + even])


@given(an_element, numbers_in_range)
def test_rounds_to_the_nearest_value(element: Element, given_values: list[float]) -> None:
    x = torch.tensor(given_values)
    grid = torch.cat([-values(element), values(element)])
    nearest = (x.double().clamp(-element.largest, element.largest).unsqueeze(1) - grid).abs().amin(1)
    rounded = round_to_grid(x, element.grid).double()
    assert torch.isin(rounded, grid).all()
    assert torch.equal((rounded - x.double().clamp(-element.largest, element.largest)).abs(), nearest)


@given(an_element, numbers)
def test_is_idempotent_monotone_and_symmetric(element: Element, given_values: list[float]) -> None:
    x = torch.tensor(given_values).sort().values
    rounded = round_to_grid(x, element.grid)
    assert torch.equal(round_to_grid(rounded, element.grid), rounded)
    assert (rounded.diff() >= 0).all() if len(x) > 1 else True
    assert torch.equal(round_to_grid(-x, element.grid), -rounded)


@given(st.lists(st.floats(2.0**-126, 2.0**127, width=32), min_size=1, max_size=20))
def test_exponents_are_floors_of_logarithms(given_values: list[float]) -> None:
    x = torch.tensor(given_values)
    exact = x.double().log2().floor().long()
    assert torch.equal(exponents(x).long(), exact) and torch.equal(exponents(x.double()), exact)
