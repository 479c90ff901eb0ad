"""Inputs that hold sizes of images: their values decide what a model does."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from fractrain_fx import FracConfig, FracModel, RunConfig, summarize
from fractrain_fx.capture import record
from fractrain_fx.capture.sizes.guards import InputValues, holds_sizes
from fractrain_fx.errors import InputError
from tests.build import rewritten as build_rewritten


class Images(nn.Module):
    """Attends within each image of a packed sequence; ``grids`` holds the height and width of each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last = nn.Linear(8, 3)

    def forward(self, pixels: Tensor, grids: Tensor) -> Tensor:
        x = self.first(pixels)
        for block in self.blocks:
            parts = x.split([height * width for height, width in grids.tolist()])
            x = x + block(torch.cat([part - part.mean(0) for part in parts])).relu()
        return self.last(x)


PIXELS = torch.randn(12, 6)
GRIDS = torch.tensor([[2, 3], [3, 2]])
OTHERS = [torch.tensor(each) for each in ([[1, 4], [4, 2]], [[12, 1]], [[3, 2], [2, 3]], [[2, 2], [2, 2], [4, 1]])]


def rewritten(model: nn.Module, recordings: int = 8) -> FracModel:
    config = FracConfig(method="float", run=RunConfig(recordings=recordings))
    return build_rewritten(model, PIXELS, GRIDS, config=config, check=True)


def test_integers_with_two_to_four_columns_are_sizes() -> None:
    assert all(map(holds_sizes, (GRIDS, torch.ones(5, 3, dtype=torch.int32), torch.ones(1, 4, dtype=torch.long))))
    tokens, mask, one = torch.ones(2, 8, dtype=torch.long), torch.ones(2, 2, dtype=torch.bool), torch.ones(3)
    assert not any(map(holds_sizes, (tokens, mask, one, PIXELS[:, :2], None, [GRIDS])))


def test_a_call_with_other_values_is_recorded_again_and_equals_the_model() -> None:
    model = Images().eval()
    expected = [model(PIXELS, each) for each in (GRIDS, *OTHERS)]
    made = rewritten(model).eval()
    for _ in range(2):
        for grids, wanted in zip((GRIDS, *OTHERS), expected, strict=True):
            assert torch.equal(made(PIXELS, grids), wanted)
    assert not made.leaves and len(list(made._state.variants)) == 1 + len(OTHERS)


def test_another_number_of_images_is_recorded_again_too() -> None:
    model = Images().eval()
    pixels, grids = torch.randn(18, 6), torch.tensor([[2, 3], [3, 2], [6, 1]])
    expected = model(pixels, grids)
    assert torch.equal(rewritten(model).eval()(pixels, grids), expected)


def test_too_many_different_values_are_refused_with_both_values_and_the_line() -> None:
    made = rewritten(Images(), recordings=2).eval()
    made(PIXELS, OTHERS[0])
    with pytest.raises(
        InputError, match=r"grids == \[\[2, 3\], \[3, 2\]\], which .*test_input_values.py:\d+ .*2 recor"
    ):
        made(PIXELS, OTHERS[1])
    made(PIXELS, GRIDS)


def test_the_values_are_fixed_without_the_comparison_too() -> None:
    recording = record(Images(), (PIXELS, GRIDS), check=False)
    assert recording.fixed_batch
    for guards in recording.guards.values():
        assert [str(each) for each in guards.values] == ["grids == [[2, 3], [3, 2]]"]


def test_the_conditions_are_listed() -> None:
    made = rewritten(Images())
    (condition,) = (each for each in made.guards if isinstance(each, InputValues))
    assert condition.name == "grids" and condition.module == "" and "grids.tolist()" in str(condition.place)
    assert "recorded for grids == [[2, 3], [3, 2]]" in str(summarize(made))


@pytest.mark.long
def test_a_compiled_model_chooses_between_its_recordings_outside_the_compiled_part() -> None:
    model = Images().eval()
    expected = [model(PIXELS, each) for each in (GRIDS, OTHERS[0])]
    made = rewritten(model).eval()
    compiled = torch.compile(made, backend="eager")
    assert all(torch.equal(compiled(PIXELS, g), y) for g, y in zip((GRIDS, OTHERS[0]), expected, strict=True))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compare the values of inputs"):
        torch.compile(made, backend="eager", fullgraph=True)(PIXELS, GRIDS)


class Tower(nn.Module):
    """Reads the sizes of images in a small part, as a model with text around its images does."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = Images(), nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, pixels: Tensor, grids: Tensor) -> Tensor:
        return self.large(self.small(pixels, grids))


def test_a_model_of_which_most_is_a_graph_for_any_values_is_not_tied_to_some() -> None:
    model = Tower().eval()
    expected = [model(PIXELS, each) for each in (GRIDS, *OTHERS)]
    made = rewritten(model).eval()
    assert list(made.leaves) == ["small"] and len(list(made._state.variants)) == 1
    assert all(torch.equal(made(PIXELS, g), y) for g, y in zip((GRIDS, *OTHERS), expected, strict=True))
