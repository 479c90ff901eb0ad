"""A rewritten model that fails on other inputs says where, in words of the model."""

from __future__ import annotations

import re
import traceback

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import FracConfig, FracModel, Pin, Precision, RunConfig, fractrainify, summarize
from fractrain_fx.config.run import Skipping
from fractrain_fx.errors import CalibrationError, InputError
from tests import build


class Positions(nn.Module):
    """Has a table of positions for five tokens, so that it runs at this length only."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(6, 8), Block(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + self.block(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(8, 8), nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x + self.table


def rewritten(**config: object) -> FracModel:
    return build.rewritten(Positions(), torch.randn(4, 5, 6), config=build.paper("dfq", **config), check=True)


@pytest.mark.parametrize("skipping", ["computed", "left-out"])
def test_other_sizes_than_the_model_takes_name_the_module_the_line_and_both_shapes(
    skipping: Skipping, capsys: pytest.CaptureFixture[str]
) -> None:
    model = rewritten(run=RunConfig(skipping=skipping))
    with pytest.raises(InputError, match=r"must match the size") as told:
        model(torch.randn(3, 7, 6))
    words = str(told.value)
    assert " of block" in words and "test_failures.py:" in words
    assert "x was float32 (4, 5, 6) and is float32 (3, 7, 6)" in words and "fractrainify(model.restore()" in words
    assert isinstance(told.value.__cause__, RuntimeError)
    assert capsys.readouterr().err == ""  # fx would print the code that it made


def test_an_op_is_named_where_one_fails() -> None:
    with pytest.raises(InputError, match=r"op 'stem' .*was float32 \(4, 5, 6\) and is float32 \(4, 5, 9\)"):
        rewritten()(torch.randn(4, 5, 9))


def test_an_error_on_inputs_of_the_recorded_shapes_is_the_models_own_with_a_note() -> None:
    class Strict(Positions):
        def forward(self, x: Tensor, index: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)[torch.arange(4), index]

    model = fractrainify(Strict(), example_inputs=(torch.randn(4, 5, 6), torch.zeros(4, dtype=torch.long)))
    with pytest.raises(IndexError) as told:
        model(torch.randn(4, 5, 6), torch.full((4,), 9))
    assert "raised in node" in told.value.__notes__[0]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt(), MemoryError()])
def test_what_is_no_fault_of_the_call_passes_unchanged(error: BaseException) -> None:
    model = rewritten()

    def fail(*_: object) -> None:
        raise error

    handle = next(iter(model.frac.gates.children())).register_forward_pre_hook(fail)
    with pytest.raises(type(error)) as told:
        model(torch.randn(3, 7, 6))
    handle.remove()
    assert told.value is error


def test_an_evaluation_of_weights_that_had_no_data_at_the_rewrite_is_still_told_as_such() -> None:
    model = rewritten()
    model._state.measured = False  # as on the meta device
    with pytest.raises(CalibrationError, match="calibrate"):
        model.eval()(torch.randn(4, 5, 6))


def test_weights_without_data_are_not_measured() -> None:
    with torch.device("meta"):
        config = FracConfig(method="static", pins=(Pin("*", Precision(8, 8)),))
        model = fractrainify(nn.Linear(6, 6), config=config, example_inputs=(torch.randn(2, 6),))
    assert not model._state.measured


class Sized(nn.Module):
    """A classifier of images of 16 pixels: ``strict`` says so itself, and otherwise its head does not fit."""

    def __init__(self, strict: bool) -> None:
        super().__init__()
        self.strict, self.stem, self.body = strict, nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4 * 16 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.strict and x.shape[-1] != 16:
            raise ValueError(f"images of {x.shape[-1]} pixels.")
        x = self.stem(x)
        return self.head((x + self.body(x)).flatten(1))


@pytest.mark.parametrize(
    ("strict", "message"),
    [
        (
            True,
            r"itself refuses these inputs: ValueError: images of 20 pixels \(.*test_failures\.py:\d+\)\. Pass",
        ),
        (False, r"in op 'head' of head, recorded from .*test_failures\.py:\d+.* or rewrite the model on inputs like"),
    ],
)
def test_another_image_size_names_both_sizes_and_the_way_out_without_generated_code(strict: bool, message: str) -> None:
    model = fractrainify(Sized(strict), example_inputs=(torch.randn(2, 3, 16, 16),))
    with pytest.raises(InputError, match=message) as caught:
        model(torch.randn(2, 3, 20, 20))
    assert "x was float32 (2, 3, 16, 16) and is float32 (2, 3, 20, 20)" in str(caught.value)
    assert "eval_with_key" not in "".join(traceback.format_exception(caught.value))


class Ordered(nn.Module):
    """Attention over a sequence of seven in dimension 0: another size there does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 2)
        self.place, self.attention = nn.Parameter(torch.zeros(7, 1, 8)), nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) + self.place
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


def test_a_sequence_in_place_of_the_samples_is_named_where_the_batch_size_is_fixed() -> None:
    model = fractrainify(Ordered(), example_inputs=(torch.randn(7, 3, 8),))
    hint = r"attention takes sequence-first inputs: if dimension 1 has the samples, set run\.batch_axis=1"
    assert re.search(hint, " ".join(str(summarize(model)).split()))
    with pytest.raises(InputError, match=hint):
        model(torch.randn(6, 3, 8))
    right = fractrainify(
        Ordered(), config=FracConfig(run=RunConfig(batch_axis=1)), example_inputs=(torch.randn(7, 3, 8),)
    )
    assert right(torch.randn(7, 5, 8)).shape == (7, 5, 2) and "sequence-first" not in str(summarize(right))
