"""What used to tie a recording to one batch: lists of all samples, tables made at the first call, checks of values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fractrain_fx.capture import record


class KeepsAList(nn.Module):
    """Takes its samples apart and puts the first ``count`` together again, as models of text and images do."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(list(self.linear(x))[: self.count], dim=0)


def test_a_list_of_all_samples_holds_all_of_any_batch() -> None:
    recording = record(KeepsAList(9), (torch.randn(2, 4, 3),))
    assert not recording.leaves
    assert recording.train(torch.randn(5, 4, 3)).shape == (20, 3)


def test_a_list_of_some_samples_stays_one_of_some() -> None:
    recording = record(KeepsAList(2), (torch.randn(3, 4, 3),))
    assert recording.train(torch.randn(5, 4, 3)).shape == (8, 3)


class MakesATable(nn.Module):
    """Replaces a placeholder by a table of the input's length, outside its checkpoint, at the first call."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("table", torch.zeros(1), persistent=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) != x.shape[1]:
            self.table = torch.arange(x.shape[1], dtype=x.dtype)
        return self.linear(x) + self.table[:, None]


def test_a_table_made_at_the_first_call_is_made_before_recording() -> None:
    model = nn.Sequential(MakesATable(), nn.Linear(3, 2))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    x = torch.randn(2, 4, 3)
    recording = record(model, (x,))
    assert not recording.leaves
    assert model.state_dict().keys() == before.keys()
    assert torch.equal(recording.train(x), model(x))


class ChecksValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        torch._check_tensor_all(x < 100)
        return self.linear(x)


def test_torchs_own_checks_of_values_do_not_make_a_module_whole() -> None:
    recording = record(nn.Sequential(ChecksValues(), nn.Linear(3, 2)), (torch.randn(2, 3),))
    assert not recording.leaves
