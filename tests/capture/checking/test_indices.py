"""Sizes that a model cannot take, on a device whose kernels do not raise: indices are looked at before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fractrain_fx.capture import record
from fractrain_fx.capture.checking import check
from fractrain_fx.capture.checking.indices import CheckedIndices
from fractrain_fx.errors import CaptureError
from tests.elsewhere import Elsewhere, put_elsewhere

X = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize(
    ("look_up", "last"),
    [
        (lambda i: F.embedding(i, X), 2),
        (lambda i: F.embedding_bag(i, X, torch.tensor([0])), 2),
        (lambda i: X.index_select(1, i), 3),
        (lambda i: X.gather(1, i[None]), 3),
        (lambda i: X.scatter(1, i[None], 0.0), 3),
        (lambda i: X.scatter_add(1, i[None], X), 3),
        (lambda i: X.clone().index_add_(0, i, X[:1]), 2),
        (lambda i: X.index_fill(0, i, 0.0), 2),
        (lambda i: X.take(i), 11),
        (lambda i: X[i], 2),
        (lambda i: X[:, i], 3),
        (lambda i: X.view(3, 2, 2)[X.view(3, 2, 2)[..., 0] >= 0, i], 1),
        (lambda i: X.clone().index_put_((i, i), torch.zeros(1)), 2),
    ],
)
def test_each_way_to_look_something_up_is_an_error_out_of_range(look_up: Callable[[Tensor], Tensor], last: int) -> None:
    with CheckedIndices():
        assert look_up(torch.tensor([last])).isfinite().all()
        for wrong in (last + 1, -13):
            with pytest.raises(IndexError, match="asks for entries"):
                look_up(torch.tensor([wrong]))


def test_a_negative_index_counts_from_the_end_only_where_torch_counts_so() -> None:
    with CheckedIndices():
        assert torch.equal(X[torch.tensor([-1])], X[2:]) and X.take(torch.tensor([-12])) == 0
        with pytest.raises(IndexError, match="entries -1 to -1 of 3"):
            F.embedding(torch.tensor([-1]), X)
        assert len(X[torch.tensor([], dtype=torch.long)]) == 0


class Places(nn.Module):
    """Has a place for each sample of its example, and a few more."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(11, 4), nn.Embedding(3, 4), nn.Linear(4, 11)

    def forward(self, words: Tensor) -> Tensor:
        places = self.places(torch.arange(len(words), device=words.device))
        return self.head(self.words(words) + places[:, None])


def test_a_model_is_tried_with_more_samples_than_it_takes_without_an_error_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = []

    class Spying(CheckedIndices):
        def __exit__(self, kind: object, *raised: object) -> None:
            refused.append(kind)
            super().__exit__(kind, *raised)

    monkeypatch.setattr("fractrain_fx.capture.checking.outcome.CheckedIndices", Spying)
    words = torch.randint(11, (2, 8))
    assert record(Places(), (words,)).checked and not refused  # a CPU raises by itself
    with Elsewhere():
        model = Places()
        put_elsewhere(model)
        assert record(model, (words.to("lazy"),)).checked
    assert IndexError in refused and None in refused


def test_a_device_that_was_lost_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise torch.AcceleratorError("device-side assert triggered")

    monkeypatch.setattr(check, "trial_of", lost)
    with pytest.raises(CaptureError, match=r"the GPU stopped.*rewrite the model on the CPU"):
        record(Places(), (torch.randint(11, (2, 8)),))
