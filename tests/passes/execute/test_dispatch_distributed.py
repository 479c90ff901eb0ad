"""DDP over dispatched blocks: processes that run different samples, or none, have the same gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fractrain_fx import Engine, FracModel, RunConfig
from fractrain_fx.config.run import Skipping
from fractrain_fx.passes import undispatched
from tests.build import rewritten
from tests.choices import choose, without_gradient_of_skipping

pytestmark = pytest.mark.long

# All skip on the first process; on the second, some run one block and nobody the other.
OPTIONS = ([[0] * 4, [0] * 4], [[1, 0, 1, 0], [0] * 4])


class Decoder(nn.Module):
    """What ``encoder`` gives is read by branches only."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.encoder = nn.Linear(4, 8), nn.Linear(4, 8)
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        encoded = self.encoder(x).tanh()
        x = self.stem(x)
        x = x + self.first(x * encoded).relu()
        x = x + self.second(x * encoded).relu()
        return self.head(x)


def batch_of(rank: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))


def model_of(skipping: Skipping, rank: int) -> FracModel:
    torch.manual_seed(0)
    model = rewritten(Decoder(), torch.randn(2, 4), method="slu", run=RunConfig(skipping=skipping))
    choose(model, *OPTIONS[rank])
    if skipping == "computed":
        without_gradient_of_skipping(model)
    return model


def step(model: nn.Module, engine: Engine, x: Tensor) -> None:
    engine.loss(model(x).square().mean()).backward()


def _process(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = model_of("left-out", rank)
    together = DistributedDataParallel(model)
    engine = Engine(together)
    for _ in range(3):  # an unused parameter would be an error in the second step
        model.zero_grad()
        step(together, engine, batch_of(rank))
    torch.save({name: p.grad for name, p in model.named_parameters()}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_a_process_on_which_all_skip_keeps_up_with_one_on_which_some_run(tmp_path: Path) -> None:
    assert undispatched(model_of("left-out", 0).graph_module) == {}
    mp.spawn(_process, (str(tmp_path),), nprocs=2)
    mine, theirs = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    alone: list[dict[str, Tensor | None]] = []
    for rank in (0, 1):
        model = model_of("computed", rank)
        step(model, Engine(model), batch_of(rank))
        alone.append({name: p.grad for name, p in model.named_parameters()})
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name
        parts = [each[name] for each in alone]
        if parts[0] is not None and parts[1] is not None and not name.startswith("frac."):  # the cost's sign is shared
            torch.testing.assert_close(mine[name], (parts[0] + parts[1]) / 2, rtol=1e-4, atol=1e-6)
    assert mine["encoder.weight"].any() and not mine["second.weight"].any()
