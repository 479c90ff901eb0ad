"""The sweep's calls at other sizes: which there are, and what becomes of a rewritten model at them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from benchmarks.coverage.cases import Ready
from benchmarks.coverage.checks import evaluate, train_outputs
from benchmarks.coverage.resized import Pair, summary, worst
from benchmarks.coverage.sizes import Variant, variants
from benchmarks.coverage.trial import CHECKS, examine, passed
from fractrain_fx.capture.state import Snapshot
from fractrain_fx.errors import InputError
from tests.residual import Residual


def shapes(found: Variant) -> list[tuple[int, ...]]:
    return [tuple(x.shape) for x in (*found.args, *found.kwargs.values())]


def by_label(*args: Tensor, **kwargs: Tensor) -> Mapping[str, Variant]:
    return {each.label: each for each in variants(args, kwargs)}


def test_batches_of_one_of_one_more_and_of_more_than_twice_as_many() -> None:
    found = by_label(torch.randn(2, 6))
    assert [label for label in found if label.startswith("batch")] == ["batch 2 to 1", "batch 2 to 3", "batch 2 to 5"]
    assert shapes(found["batch 2 to 5"]) == [(5, 6)]


def test_a_text_and_all_that_has_its_length_are_cut_and_continued_together() -> None:
    ids, mask = torch.arange(32).reshape(2, 16), torch.ones(2, 16)
    mask[1, -4:] = 0
    pairs = torch.ones(2, 1, 16, 16, dtype=torch.bool)
    found = by_label(input_ids=ids, attention_mask=mask, pairs=pairs, pixel_values=torch.randn(2, 3, 64, 64))
    assert {"length 16 to 15", "length 16 to 8", "length 16 to 17", "length 16 to 32"} <= found.keys()
    longer = found["length 16 to 32"]
    assert shapes(longer) == [(2, 32), (2, 32), (2, 1, 32, 32), (2, 3, 64, 64)]
    assert torch.equal(longer.kwargs["input_ids"][:, :16], ids)
    assert not longer.kwargs["attention_mask"][1, 16:20].any()
    assert shapes(found["length 16 to 8"])[0] == (2, 8)


def test_images_change_with_their_masks() -> None:
    found = by_label(torch.randn(2, 3, 64, 96), torch.ones(2, 64, 96, dtype=torch.bool))
    assert shapes(found["image 64 x 96 to 96 x 128"]) == [(2, 3, 96, 128), (2, 96, 128)]
    assert shapes(found["image 64 x 96 to 32 x 64"]) == [(2, 3, 32, 64), (2, 32, 64)]


def test_volumes_change_in_depth_too_and_small_images_by_half() -> None:
    assert shapes(by_label(torch.randn(2, 1, 32, 32, 32))["image 32 x 32 x 32 to 16 x 16 x 16"]) == [(2, 1, 16, 16, 16)]
    assert "image 16 x 16 to 48 x 48" in by_label(torch.randn(2, 16, 16, 3))


class Pooled(nn.Module):
    """Any length up to six."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 6:
            raise ValueError("too long")
        return self.head(x.sum(1))


class Frozen(Pooled):
    """What a recording may make of it."""

    def __init__(self, model: Pooled, does: str) -> None:
        super().__init__()
        self.head, self.does = model.head, does

    def forward(self, x: Tensor) -> Tensor:
        if self.does == "refuse" and x.shape[1] != 4:
            raise InputError("pooled.py:12: the length was 4")
        if self.does == "fail":
            raise RuntimeError("shape mismatch")
        if self.does == "freeze":
            x = x[:, :4]
        return super().forward(x)


@pytest.mark.parametrize(
    ("does", "outcome"),
    [("as it should", "equal"), ("refuse", "refused"), ("fail", "raw error"), ("freeze", "silently different")],
)
def test_what_becomes_of_a_longer_sequence(does: str, outcome: str) -> None:
    model = Pooled()
    pair = Pair(model, Frozen(model, does), Snapshot(model), frozenset())
    found = by_label(torch.randn(2, 4, 4))
    longer = found["length 4 to 5"]
    assert worst(pair.at(longer, run) for run in (evaluate, train_outputs))[0] == outcome
    assert pair.at(found["length 4 to 8"], evaluate)[0] == "the model itself refuses"


def test_one_word_for_all_sizes() -> None:
    found = {"batch 2 to 1": "equal", "length 4 to 3": "refused", "image 8 x 8 to 4 x 4": "the model itself refuses"}
    assert summary(found, "batch") == "equal"
    assert summary(found, "length", "image") == "tied"
    assert summary(found, "image") == ""
    assert summary(found, "batch", "length") == "equal or refused"
    assert summary(found | {"length 4 to 5": "silently different"}, "length") == "silently different"


def test_a_row_says_what_became_of_each_size() -> None:
    row = examine(lambda: Ready(Residual(), Residual, (torch.randn(2, 6),)))
    assert row["sizes"]["batch 2 to 5"] == "equal"
    assert row["sizes"]["length 6 to 5"] == "the model itself refuses"
    before = {"checks": {name: "passed" for name in CHECKS if name != "sizes"}}
    assert passed(before)
