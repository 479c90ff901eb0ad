"""How many samples a call has, wherever its tensors lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import Engine, FracModel, fractrainify
from tests import build
from tests.training.tiny import Plain


class Windows(nn.Module):
    """Takes its whole batch as one dictionary, in which a table for all samples comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        x = self.stem(batch["series"]["past"] + batch["table"].mean(0))
        x = x + self.block(x.relu())
        return self.head(x) * batch["mask"]


def windows(samples: int) -> dict[str, Any]:
    return {"table": torch.randn(5, 6), "series": {"past": torch.randn(samples, 6)}, "mask": torch.ones(samples, 1)}


def rewritten(**config: Any) -> FracModel:
    return build.rewritten(Windows(), windows(4), config=build.paper("dfq", **config))


def test_a_batch_inside_one_dictionary_is_found() -> None:
    model = rewritten()
    for samples in (4, 7):
        Engine(model).loss(model(windows(samples)).square().mean()).backward()
        assert model.batch == samples and all(len(choice) == samples for choice in model.cost.choice.values())


@pytest.mark.long
def test_such_a_call_compiles_whole() -> None:
    model = rewritten()
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    for samples in (4, 7, 9):
        Engine(compiled).loss(compiled(windows(samples)).square().mean()).backward()
        assert model.batch == samples


def test_a_table_of_all_samples_does_not_count_them() -> None:
    class WithTable(Plain):
        def forward(self, table: Tensor, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x + table.mean()) * weight

    example = (torch.randn(9, 2), torch.randn(2, 3, 8, 8), torch.ones(2, 1))
    model = fractrainify(WithTable(), example_inputs=example, check=False)
    model(torch.randn(9, 2), torch.randn(5, 3, 8, 8), torch.ones(5, 1))
    assert model.batch == 5
