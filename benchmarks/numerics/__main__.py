"""Compare estimated sensitivities with the true change of the loss, op by op, and print a table.

``python -m benchmarks.numerics --data-dir DIR --text-dir DIR`` trains ResNet-20, ViT-Tiny and a smaller ViT (16 pixels)
and GPT-2 of two layers for some steps, and measures both on the batches that come next. ``vit-tiny-long`` is trained
as transformers are, with warm-up, a falling rate and clipped gradients: give it ``--steps 4000``.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.numerics.training import learn
from benchmarks.numerics.truth import DoubleLoss, factor_changes, gradient_changes, spearman
from fractrain_fx.numerics.sensitivity import sensitivity
from fractrain_fx.numerics.sensitivity.float_copy import FloatCopy
from fractrain_fx.training import RunSettings
from fractrain_fx.training.data.loader import Share, by_name, make_loader
from fractrain_fx.training.objective import Objective
from fractrain_fx.training.run import build

_IMAGES = {"data": "cifar10", "batch_size": 128, "lr": 0.1}
_VIT = {**_IMAGES, "image_size": 16, "lr": 1e-3}
SUBJECTS: dict[str, dict[str, Any]] = {
    "resnet20": {"model": "zoo:resnet20", "image_size": 16, **_IMAGES},
    "vit-tiny": {"model": "benchmarks/numerics/models.py:tiny_vit", **_VIT},
    "vit-tiny-long": {"model": "benchmarks/numerics/models.py:tiny_vit", **_VIT, "lr": 6e-4, "warm_up": 0.05},
    "vit-small": {"model": "benchmarks/numerics/models.py:small_vit", **_VIT},
    "gpt2": {"model": "hf:gpt2", "data": "characters", "batch_size": 32, "lr": 2e-3},
}
WIDTHS = (2, 3, 4, 6)


class Agreement(NamedTuple):
    """Rank correlations of estimates and true changes, over all ops and widths.

    ``plain_x`` and ``plain_w`` are those with the change in which the first order is left, ``divergence_x`` and
    ``divergence_w`` with the divergence of predictions.
    """

    x: float
    w: float
    g: float
    plain_x: float
    plain_w: float
    divergence_x: float
    divergence_w: float


def agreement(
    name: str, seed: int, steps: int, batches: int, others: int, folder: str | None, every: int = 1
) -> Agreement:
    """Train a subject a little, estimate on ``batches``, and measure every ``every``-th op on ``others``."""
    values = SUBJECTS[name]
    settings = RunSettings.from_dict({**values, "data_dir": folder, "seed": seed, "method": "float"})
    built = build(settings)
    objective = Objective.of(built.data)
    criterion = objective.criterion
    loader = make_loader(built.data, Share(settings.train.batch_size, seed, torch.device("cpu")))
    held = [*by_name(loader.train(0, steps + batches + max(others, 2)), built.input_name)]
    warm_up = round(values.get("warm_up", 0) * steps)
    learn(built.model, _optimizer(built.model, values), held[:steps], criterion, warm_up)
    measured, unseen = held[steps : steps + batches], held[steps + batches :]
    sensitivities = sensitivity(built.model, measured, criterion=criterion, precisions=WIDTHS)
    loss = DoubleLoss(objective.logits)
    copied = FloatCopy(built.model, measured[0], loss, None)
    keys = [(name, bits) for name in [*copied.probes][::every] for bits in WIDTHS]
    ranks: dict[str, float] = {}
    for operand in ("x", "w"):
        true = factor_changes(copied, operand, WIDTHS, unseen[:others], loss, every)
        estimates = [sensitivities.of(op, operand, bits).change or 0.0 for op, bits in keys]
        ranks[operand] = spearman(estimates, [true[key].even for key in keys])
        ranks[f"plain_{operand}"] = spearman(estimates, [true[key].plain for key in keys])
        ranks[f"divergence_{operand}"] = spearman(estimates, [true[key].divergence for key in keys])
    after = gradient_changes(copied, WIDTHS, unseen[0], unseen[1:2], rate=values["lr"], every=every)
    noise = [sensitivities.of(op, "g", bits).noise or 0.0 for op, bits in keys]
    return Agreement(g=spearman(noise, [after[key] for key in keys]), **ranks)


def _optimizer(model: torch.nn.Module, values: dict[str, Any]) -> torch.optim.Optimizer:
    if values["model"].startswith("zoo:"):
        return torch.optim.SGD(model.parameters(), values["lr"], momentum=0.9, weight_decay=1e-4)
    if "warm_up" in values:
        return torch.optim.AdamW(model.parameters(), values["lr"], betas=(0.9, 0.95), weight_decay=0.05)
    return torch.optim.AdamW(model.parameters(), values["lr"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.numerics", description=__doc__)
    parser.add_argument("--model", nargs="+", choices=SUBJECTS, default=["resnet20", "vit-tiny", "vit-small", "gpt2"])
    parser.add_argument("--seed", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200, help="of training, before measuring")
    parser.add_argument("--batches", type=int, default=5, help="to estimate on")
    parser.add_argument("--measure-on", type=int, default=15, help="batches on which the true change is measured")
    parser.add_argument("--every", type=int, default=1, help="op is measured, of which a model of 12 blocks has many")
    parser.add_argument("--data-dir", help="folder of CIFAR-10's files")
    parser.add_argument("--text-dir", help="folder of text files")
    parser.add_argument("--out", metavar="FILE", help="append a line of JSON for each model and seed")
    options = parser.parse_args(argv)
    table = Table(box=box.SIMPLE_HEAD)
    for column in (
        *("model", "seed", "activations", "weights", "gradients"),
        *("with first order: x", "w", "divergence: x", "w"),
    ):
        table.add_column(column)
    for name in options.model:
        folder = options.text_dir if SUBJECTS[name]["data"] == "characters" else options.data_dir
        for seed in options.seed:
            ranks = agreement(name, seed, options.steps, options.batches, options.measure_on, folder, options.every)
            print(name, seed, ranks, flush=True)
            if options.out is not None:
                about = {"model": name, "seed": seed, "steps": options.steps, "batches": options.batches}
                line = about | {
                    "measured_on": options.measure_on,
                    "every": options.every,
                    "torch": torch.__version__,
                    **ranks._asdict(),
                }
                with open(options.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            table.add_row(name, str(seed), *(f"{value:.2f}" for value in ranks))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
