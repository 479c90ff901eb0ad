"""``python -m benchmarks.numerics.price RUN``: what a sensitivity predicts beside what a short training loses.

Each precision trains the weights of a run on for some steps, on the same batches at one learning rate. The rise is that
of the mean loss of the second half of the steps over FW-8/BW-8's. Beside it stand the estimated rise of the forward
pass, and the estimated noise of the gradients. At 8 forward bits the rest of the rise, for each unit of that noise, is
the price of noise: ``noise_price`` of ``allocate``.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.numerics.training import learn
from fractrain_fx import AffineConfig, FracConfig, Precision, fractrainify
from fractrain_fx.config.affine import Ranges
from fractrain_fx.numerics.sensitivity import sensitivity
from fractrain_fx.training.data.loader import Share, by_name, make_loader
from fractrain_fx.training.optim import make_optimizer
from fractrain_fx.training.run import resume_run
from fractrain_fx.training.trainer import Trainer

__all__ = ["prices"]

_BASE = "FW-8/BW-8"
_BATCHES = 8  # on which sensitivities are measured


def prices(trainer: Trainer, asked: Sequence[str], steps: int, rate: float) -> list[dict[str, Any]]:
    """A row for each precision, such as ``FW-4/BW-6`` or ``FW-4/BW-4:sample``, with its ranges after a colon."""
    settings, criterion = trainer.settings, trainer.objective.criterion
    loader = make_loader(trainer.data, Share(settings.batch_size, settings.seed, torch.device("cpu")))
    batches = [*by_name(loader.train(trainer.result().epochs * loader.steps, steps), trainer.input_name)]
    original = trainer.model.restore()

    def trained(config: FracConfig) -> float:
        examples = batches[0][0]
        words = {"example_kwargs": examples} if isinstance(examples, dict) else {"example_inputs": (examples,)}
        model: nn.Module = fractrainify(copy.deepcopy(original).train(), config=config, check=False, **words)
        optimizer = make_optimizer(model, replace(settings, lr=rate), trainer.data.task)
        torch.manual_seed(0)  # of the gradients' noise
        losses = learn(model, optimizer, batches, criterion)
        return sum(losses[steps // 2 :]) / (steps - steps // 2)

    base, rows = trained(_config(_BASE, "tensor")), []
    for entry in asked:
        text, _, ranges = entry.partition(":")
        precision, config = Precision.parse(text), _config(text, ranges or "tensor")
        widths = sorted({precision.fw, precision.bw})
        measured = sensitivity(
            original, batches[:_BATCHES], criterion=criterion, precisions=widths, config=config, limit=_BATCHES
        )
        forward = sum(row.change or 0.0 for row in measured.rows if row.operand != "g" and row.bits == precision.fw)
        noise = sum(row.noise or 0.0 for row in measured.rows if row.operand == "g" and row.bits == precision.bw)
        rise = trained(config) - base
        row = {"precision": text, "ranges": ranges or "tensor", "rise": rise, "forward": forward, "noise": noise}
        # With few forward bits the rest of the rise is mostly what the estimate of the forward pass misses.
        rows.append({**row, "price": (rise - forward) / noise if precision.fw == Precision.parse(_BASE).fw else None})
    return rows


def _config(precision: str, ranges: Ranges | str) -> FracConfig:
    affine = AffineConfig(ranges=ranges)  # type: ignore[arg-type]
    return FracConfig(method="static", precision=precision, affine=affine)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table, and append the rows to a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.numerics.price", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run, whose weights are trained on")
    parser.add_argument("--precisions", nargs="+", default=["FW-8/BW-6", "FW-8/BW-4:sample", "FW-4/BW-8", "FW-4/BW-6"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, required=True, help="learning rate of all steps")
    parser.add_argument("--out", type=Path, help="append a line of JSON for each precision")
    options = parser.parse_args(arguments)
    rows = prices(resume_run(options.run, Console(quiet=True)), options.precisions, options.steps, options.rate)
    table = Table("precision", "ranges", "rise", "forward", "noise", "price of noise")
    for row in rows:
        numbers = (f"{row[name]:.4f}" for name in ("rise", "forward", "noise"))
        price = "" if row["price"] is None else f"{row['price']:.3f}"
        table.add_row(row["precision"], row["ranges"], *numbers, price)
        if options.out is not None:
            about = {"run": options.run.name, "steps": options.steps, "rate": options.rate, "torch": torch.__version__}
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(about | row) + "\n")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
