"""What shows only after a recording: tables drawn once, numbers in tensors, what further recordings read."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import FracConfig, FracModel
from fractrain_fx.errors import CaptureError, FracTrainWarning
from tests.build import rewritten

FLOAT = FracConfig(method="float")


class Pair(nn.Module):
    """Two layers, and a setting."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = 1.0
        self.warm = torch.zeros(())
        self.table: Tensor | None = None
        self.tables: dict[int, Tensor] = {}


class DrawsOnce(Pair):
    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.randn(4, 4)
        return torch.as_tensor(self.last(torch.cos(self.first(x) @ self.table)))


class DrawsForEachWidth(Pair):
    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        if width not in self.tables:
            self.tables[width] = (torch.rand(width) > 0.5).float()
        return torch.as_tensor(self.last(self.first(x) * self.tables[width]))


class FillsOnce(Pair):
    """A table without random numbers, and dropout, which draws in each call."""

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(4.0)
        return torch.as_tensor(self.last(torch.dropout(self.first(x) + self.table, 0.5, self.training)))


class ReadsANumber(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.last(x) if self.warm >= 1 else self.first(x))


class WithTargets(Pair):
    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        y = self.last(self.first(x))
        return torch.as_tensor(y if targets is None else (y - targets) * self.scale)


class Encoder(nn.Module):
    """Torch's encoder, whose output is averaged over all places."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return torch.as_tensor(self.encoder(x, src_key_padding_mask=padding).mean(1))


def made(net: nn.Module, *inputs: Any) -> FracModel:
    return rewritten(net, *inputs, config=FLOAT, check=True)


@pytest.mark.parametrize("kind", [DrawsOnce, DrawsForEachWidth])
def test_a_module_that_keeps_random_numbers_of_its_first_call_stays_one_call(kind: type[nn.Module]) -> None:
    x = torch.randn(3, 4)
    with pytest.raises(CaptureError, match=r"tables?"):
        made(kind(), x)
    model = made(nn.Sequential(kind(), nn.Linear(4, 4)), x).eval()
    assert torch.equal(model(x), model(x))


def test_a_table_without_random_numbers_is_recorded_beside_dropout() -> None:
    model = made(FillsOnce(), torch.randn(3, 4))
    assert [node.name for node in model.graph.nodes if "dropout" in str(node.target)]


def test_a_number_that_code_reads_from_a_tensor_is_watched_in_place() -> None:
    net, x = ReadsANumber(), torch.randn(3, 4)
    model = made(net, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FracTrainWarning)
        model(x)
    net.warm.fill_(1)
    with pytest.warns(FracTrainWarning, match="warm was tensor"):
        model(x)


def test_attributes_that_only_a_further_recording_reads_are_watched() -> None:
    net, x = WithTargets(), torch.randn(3, 4)
    model = made(net, x)
    model(x, x + 1)
    net.scale = 3.0
    with pytest.warns(FracTrainWarning, match=r"scale was 1\.0"):
        model(x, x + 1)


@pytest.mark.parametrize("with_padding", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_zeros_of_torchs_encoder_at_padded_places_are_told_of(nested: bool, with_padding: bool) -> None:
    x, padding = torch.randn(2, 5, 8), torch.arange(5)[None] >= torch.tensor([[5], [3]])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = made(Encoder(nested), x, *([padding] if with_padding else []))
        model(x, padding)
    told = [str(warning.message) for warning in caught if "zeros at padded places" in str(warning.message)]
    assert len(told) == nested
