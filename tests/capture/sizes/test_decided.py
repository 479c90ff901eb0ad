"""Sizes that data decide are values: another batch of the same shape may have others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fractrain_fx.capture import record
from fractrain_fx.errors import CaptureError, InputError
from tests.build import rewritten

LENGTHS = [torch.tensor(each) for each in ([3, 3], [5, 1], [6, 0], [2, 4])]


def boxes(n: Tensor) -> Tensor:
    return torch.stack([n, n, n + 3, n + 3], 1).float()


def packed(x: Tensor, n: Tensor) -> Tensor:
    sequence = pack_padded_sequence(x, n.clamp(min=1), batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(sequence, batch_first=True)[0]


FOREIGN = "boxes that do not overlap"
OPS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "a slice": lambda x, n: x.transpose(0, 1)[: n.max()],
    "a slice by a number": lambda x, n: x.transpose(0, 1)[: n.max().item()],
    "a slice behind the end": lambda x, n: x.transpose(0, 1)[: n.max() + 3],
    "narrow": lambda x, n: x.narrow(1, 0, n.max()).transpose(0, 1),
    "arange": lambda x, n: torch.arange(n.max()),
    "arange, by name": lambda x, n: torch.arange(end=n.max()),
    "zeros": lambda x, n: torch.zeros((n.max(), 2)),
    "expand": lambda x, n: x[0, :1].expand(n.max(), 4),
    "one_hot": lambda x, n: F.one_hot(n).t(),
    "repeat_interleave": lambda x, n: torch.repeat_interleave(x[0, :2], n * n, 0),
    "repeat_interleave, by name": lambda x, n: torch.repeat_interleave(input=x[0, :2], repeats=n * n, dim=0),
    "where, by name": lambda x, n: torch.where(condition=n > 2)[0],
    "nonzero, by name": lambda x, n: torch.nonzero(input=n > 2),
    "masked_select, by name": lambda x, n: torch.masked_select(input=n, mask=n > 2),
    "unique, by name": lambda x, n: torch.unique(input=n),
    "bincount, by name": lambda x, n: torch.bincount(input=n),
    "a mask": lambda x, n: x[0, :2][n > 2],
    "pad_packed_sequence": lambda x, n: packed(x, n).transpose(0, 1),
    "values of a sparse tensor": lambda x, n: (n[:, None] > torch.arange(6)[None]).float().to_sparse().values()[4:],
    FOREIGN: lambda x, n: torchvision.ops.nms(boxes(n), n.float(), 0.01),
    "split": lambda x, n: x[0].split(n.tolist())[0],
}
LOOKS: dict[str, Callable[[Tensor], int]] = {
    "a branch": lambda cut: 2 if cut.shape[0] > 2 else 1,
    "a loop": lambda cut: sum(2 for _ in range(cut.shape[0])),
}


class Cuts(nn.Module):
    """Multiplies by a number that follows from a size that data decide."""

    def __init__(self, op: Callable[[Tensor, Tensor], Tensor], look: Callable[[Tensor], int]) -> None:
        super().__init__()
        self.op, self.look, self.layer = op, look, nn.Linear(4, 4)

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return self.layer(x) * (3 + self.look(self.op(x.detach(), n)))


class HasPart(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(4, 4), part, nn.Linear(4, 4)

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return self.last(self.part(self.first(x), n))


def may_differ(net: nn.Module, x: Tensor) -> Any:
    """The rewritten model, after a test that it gives the output of ``net``, or an error, for other lengths."""
    model = rewritten(copy.deepcopy(net), x, LENGTHS[0], method="float", check=True)
    for n in LENGTHS:
        try:
            assert torch.equal(model(x, n), net(x, n))
        except InputError as error:
            assert "take another way" in str(error)
            assert not torch.equal(LENGTHS[0], n)
    return model


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("op", OPS)
def test_other_data_of_one_shape_give_the_models_output_or_an_error(op: str, look: str) -> None:
    net = Cuts(OPS[op], LOOKS[look])
    try:
        may_differ(net, torch.randn(2, 6, 4))
    except CaptureError as error:
        assert "data decide" in str(error) or "depends on values" in str(error)


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("op", [op for op in OPS if op != FOREIGN])
def test_in_a_part_they_keep_it_whole(op: str, look: str) -> None:
    net = HasPart(Cuts(OPS[op], LOOKS[look]))
    x = torch.randn(2, 6, 4)
    model = rewritten(copy.deepcopy(net), x, LENGTHS[0], method="float", check=True)
    assert list(model._state.recording.leaves) == ["part"]
    for n in LENGTHS:
        assert torch.equal(model(x, n), net(x, n))


def test_in_a_part_what_an_operator_of_another_library_gives_is_tested() -> None:
    model = may_differ(HasPart(Cuts(OPS[FOREIGN], LOOKS["a branch"])), torch.randn(2, 6, 4))
    assert not model._state.recording.leaves


NOT_DECIDED: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "entries": lambda x, n: x[torch.arange(2), n - 1],
    "one_hot with classes": lambda x, n: F.one_hot(n, 9),
    "a masked tensor": lambda x, n: x.masked_fill(n[:, None, None] > 2, 0.0),
    "a tensor times a mean": lambda x, n: x.transpose(0, 1) * n.float().mean().item(),
    "a tensor times a number": lambda x, n: x.transpose(0, 1) * n.max().item(),
    "a slice by a constant": lambda x, n: x.transpose(0, 1)[: torch.tensor([2, 5]).max()],
}


@pytest.mark.parametrize("op", NOT_DECIDED)
def test_sizes_that_follow_from_shapes_are_guards(op: str) -> None:
    recording = record(Cuts(NOT_DECIDED[op], LOOKS["a loop"]), (torch.randn(2, 6, 4), LENGTHS[0]), check=False)
    assert not recording.leaves and not any("as_recorded" in node.name for node in recording.train.graph.nodes)


class Trims(nn.Module):
    """A part that reads values, and therefore is one call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return self.layer(x)[:, : max(n.tolist())]


class LooksBehind(nn.Module):
    def __init__(self, around: bool) -> None:
        super().__init__()
        self.trims, self.last, self.around = Trims(), nn.Linear(4, 4), around

    def forward(self, x: Tensor, n: Tensor) -> Any:
        y = self.trims(x, n)
        if self.around:
            y = x + y
        return self.last(y) * (2 if y.shape[1] > 5 else 1)


def test_the_size_of_what_a_one_call_part_gives_is_tested_at_every_call() -> None:
    net = LooksBehind(around=False)
    x, full = torch.randn(2, 6, 4), torch.tensor([6, 2])
    model = rewritten(copy.deepcopy(net), x, full, method="float", check=True)
    assert torch.equal(model(x, full), net(x, full))
    with pytest.raises(InputError, match=r"size\(1\) > 5 when recorded, at .*test_decided\.py"):
        model(x, LENGTHS[0])
    for length in (6, 7, 4):  # a size of another shape is looked up, and recorded again
        x, full = torch.randn(3, length, 4), torch.full((3,), length)
        assert torch.equal(model(x, full), net(x, full))


def test_a_way_around_such_a_part_fixes_its_size() -> None:
    recording = record(LooksBehind(around=True), (torch.randn(2, 6, 4), torch.tensor([6, 2])))
    assert not any("as_recorded" in node.name for node in recording.train.graph.nodes)
    assert [str(guard) for guard in recording.guards[True].guards] == ["add.size(1) > 5"]
