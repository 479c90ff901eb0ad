"""Samples packed into rows, and sizes of parts that are read as a list."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fractrain_fx import fractrainify
from fractrain_fx.capture import record
from fractrain_fx.capture.checking.check import Batching


class Pictures(nn.Module):
    """Takes the patches of all images as rows, and the height and width of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def cut(self, x: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        return torch.split(x, sizes.prod(-1).tolist())

    def forward(self, patches: Tensor, sizes: Tensor) -> Tensor:
        x = self.stem(patches)
        x = torch.cat(self.cut(x + self.body(x).relu(), sizes), dim=0)
        return self.head(x)


class Loops(Pictures):
    """PythonReads at the sizes."""

    def cut(self, x: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        return tuple(part * n for part, n in zip(super().cut(x, sizes), sizes.prod(-1).tolist(), strict=True))


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.out = inner, nn.Sequential(nn.Linear(3, 64), nn.Linear(64, 2))

    def forward(self, patches: Tensor, sizes: Tensor) -> Tensor:
        return self.out(self.inner(patches, sizes))


def batch(images: int) -> tuple[Tensor, Tensor]:
    return torch.randn(images * 4, 6), torch.tensor([[2, 2]] * images)


def test_sizes_handed_on_unread_stay_in_the_graph_for_any_number_of_samples() -> None:
    model = Pictures()
    recording = record(model, batch(2))
    assert recording.batching is Batching.PACKED
    assert recording.leaves == {}
    for images in (1, 3, 5):
        inputs = batch(images)
        assert torch.equal(recording.train(*inputs), model(*inputs))


def test_whoever_looks_at_the_sizes_is_kept_whole() -> None:
    recording = record(Around(Loops()), batch(2))
    assert list(recording.leaves) == ["inner"]
    assert "tolist()" in recording.leaves["inner"]


def test_packed_samples_choose_their_precision_one_by_one() -> None:
    model = fractrainify(Pictures(), example_inputs=batch(2))
    assert [block.skip for block in model.blocks if block.gated] == ["identity"]
    model(*batch(3)).sum().backward()
    (choice,) = model.cost.choice.values()
    assert choice.shape[0] == 3
