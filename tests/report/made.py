"""Run folders as the trainer leaves them, in seconds: real costs, a real schedule, made-up losses and choices."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

from fractrain_fx import Engine, FracModel
from fractrain_fx.config.precision import Precision
from fractrain_fx.hardware.run_cost import StepPrices, run_cost
from fractrain_fx.hardware.run_machines import price_run
from fractrain_fx.nn.cost import Cost, CostMeter, Forward
from fractrain_fx.training import RunResult, RunSettings, TrainSettings
from fractrain_fx.training.length import RunLength
from fractrain_fx.training.log import RunLog
from fractrain_fx.training.log.messages import epoch_bits
from fractrain_fx.training.log.records import EpochRecord, Start, keep_start
from fractrain_fx.zoo.models import resnet74
from tests.build import paper, rewritten

BATCH = 128


class Steered:
    """A model whose gates choose what meets the target: each block spreads its samples over cheap and dear options."""

    def __init__(self, model: FracModel) -> None:
        self.frac_config, self.macs, self.targets = model.frac_config, model.macs, model.targets
        self.uncounted, self.gated_share, self.training_macs = model.uncounted, model.gated_share, model.training_macs
        (self._meter,) = (module for module in model.graph_module.modules() if isinstance(module, CostMeter))
        self.cost: Cost

    @property
    def training_forward(self) -> Forward:
        return Forward(self.cost, BATCH, None, training=True)

    def count_forward(self) -> Forward:
        return self.training_forward

    def set_precision(self, precision: Precision) -> None:
        raise AssertionError("only gated methods are made here")

    def set_target(self, target: float) -> None:
        pass

    def look_for_changes(self) -> None:
        pass

    def choose(self, target: float, noise: torch.Generator) -> None:
        options = self.frac_config.gate_options
        share = torch.tensor([option.mean_share(self.frac_config.gate_weight_bits) for option in options])
        taste = torch.randn(len(self._meter.blocks), len(options), generator=noise)
        low, high = -400.0, 400.0
        for _ in range(30):
            middle = (low + high) / 2
            chance = (taste + middle * share).softmax(1)
            low, high = (middle, high) if float((chance @ share).mean()) < target else (low, middle)
        picked = [row.multinomial(BATCH, replacement=True, generator=noise) for row in chance]
        self.cost = self._meter([nn.functional.one_hot(each, len(options)) for each in picked])


@cache
def resnet74_gated() -> FracModel:
    x = torch.rand(2, 3, 32, 32)
    return rewritten(resnet74(), x, config=paper(weight_bits=4))


def losses(epoch: int, since: int) -> Tensor:
    """A training loss that falls after each turning point, and flattens."""
    return torch.tensor(1.8 * math.exp(-epoch / 30) * (0.75 + 0.25 * math.exp(-since / 3)) + 0.02)


def make_run(out: Path, epochs: int = 160) -> RunResult:
    """FracTrain's folder of ResNet-74 (36 blocks) on CIFAR-10, written by what writes them in training."""
    model, noise = resnet74_gated(), torch.Generator().manual_seed(0)
    loop = TrainSettings(epochs=epochs, batch_size=BATCH, device="cpu")
    settings = RunSettings("zoo:resnet74", "cifar10", train=loop, frac=model.frac_config)
    out.mkdir(parents=True)
    settings.to_yaml(out / "config.yaml")
    keep_start(out, Start.now(["train", "--config", "recipe.yaml"], epoch=0, device="cpu", processes=1))
    steered = Steered(model)
    engine, prices = Engine(steered), StepPrices(model, BATCH)
    seconds, turned, values = 0.0, 0, []
    with RunLog(out, RunLength(loop, 1), console=Console(quiet=True)) as log:
        for epoch in range(1, epochs + 1):
            for _ in range(2):
                level = engine.level
                assert isinstance(level, float)
                steered.choose(level / 100, noise)
                engine.loss(losses(epoch, epoch - turned))
            turned = epoch if engine.end_epoch() is not None else turned
            row, seconds = engine.ledger.rows[-1], seconds + 31.5
            values.append(94 - 60 * math.exp(-epoch / 25) + 0.3 * math.sin(epoch))
            spent = run_cost(prices, [row]).total
            log.epoch(
                EpochRecord(
                    row,
                    "accuracy",
                    values[-1],
                    test_loss=1.1 * (row.loss or 0.0) + 0.2,
                    lr=0.1,
                    total_macs=engine.ledger.total_macs,
                    seconds=seconds,
                    steps=2,
                    train_seconds=30.25,
                    bitfusion_joules=spent.joules,
                    bitfusion_seconds=spent.seconds,
                ).to_dict(),
                epoch_bits(row, model.frac_config),
            )
    ledger, best = engine.ledger, max(range(epochs), key=lambda index: values[index])
    result = RunResult(
        label="fractrain",
        metric="accuracy",
        value=values[-1],
        best=values[best],
        best_epoch=best + 1,
        mean_cp=ledger.mean_cp,
        mean_cp_total=ledger.mean_cp_total,
        total_macs=ledger.total_macs,
        best_macs=ledger.total_macs * (best + 1) / epochs,
        seconds=seconds,
        turning_points=ledger.turning_points,
        epochs=epochs,
        uncounted=ledger.uncounted,
        turning_steps=ledger.turning_steps,
        hardware={
            "end": run_cost(prices, ledger.rows).to_dict(),
            "best": run_cost(prices, ledger.rows[: best + 1]).to_dict(),
        },
        machines=price_run(model, ledger.rows, BATCH),
    )
    result.to_json(out / "result.json")
    return result
