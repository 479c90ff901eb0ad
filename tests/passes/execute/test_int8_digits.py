"""Training on digits by integer codes beside the simulation: the same gates' choices, and as good a loss."""

from __future__ import annotations

import statistics

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fractrain_fx import Engine, FracConfig, GateConfig, RunConfig
from fractrain_fx.config import Method
from fractrain_fx.training.data.embedded import load_digits
from tests.build import rewritten
from tests.products import needs_kernels
from tests.training.data.layouts import tensors

STEPS, ALIKE, WIDTH, SEED = 200, 50, 64, 2


class _Net(nn.Module):
    """A stem, three residual blocks and a head, of linear layers only: every op has a form on integers."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, 10)
        self.norm = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, up, down in zip(self.norm, self.up, self.down, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return self.head(x)


def _trained(config: FracConfig) -> tuple[list[float], list[list[int]], dict[str, str]]:
    """The loss and the choices of each step, and how the ops multiplied."""
    samples, y = tensors(load_digits().train)
    x = samples.flatten(1)
    torch.manual_seed(SEED)
    model = rewritten(_Net(x.shape[1]), x[:2], config=config).train()
    engine, optimizer = Engine(model), torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    order = torch.Generator().manual_seed(SEED)
    torch.manual_seed(SEED + 1)
    losses, choices = [], []
    for _ in range(STEPS):
        rows = torch.randint(len(x), (32,), generator=order)
        loss = F.cross_entropy(model(x[rows]), y[rows])
        choices.append([int(option) for each in model.cost.choice.values() for option in each.argmax(1)])
        engine.loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, choices, model.kernels()


@pytest.mark.long
@needs_kernels
@pytest.mark.parametrize("method", ["pfq", "dfq"])
def test_codes_train_as_the_simulation_does(method: Method) -> None:
    # The sign of the error is the same in both, where a multiplier would carry on the smallest difference of cp.
    gate = GateConfig(control="sign", init="linear") if method == "dfq" else GateConfig()
    config = FracConfig(method=method, run=RunConfig(backend="cpu"), gate=gate)
    wanted, picked, _ = _trained(config)
    coded = config.replace(**{"run.backend": "codes-always"})
    losses, choices, kernels = _trained(coded)
    assert set(kernels.values()) == {"int8"}
    assert choices[:ALIKE] == picked[:ALIKE]
    # Sooner or later a sum in another order moves a value to another level, as a change of a weight by 1e-7 does too.
    ends = [statistics.fmean(each[-20:]) for each in (wanted, losses)]
    assert ends[1] == pytest.approx(ends[0], rel=0.1)
    assert ends[0] < 0.2 * wanted[0]
