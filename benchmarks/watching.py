"""The cost of watching: one watched step, and steps between watched ones, beside steps of a model that is not watched.

``python -m benchmarks.watching`` prints the median ratios of interleaved steps of ResNet-38 and of a ViT.
"""

from __future__ import annotations

from benchmarks.steady import steady

if __name__ == "__main__":
    steady()

import argparse
from collections.abc import Callable
from statistics import median

import timm
import torch
from torch import Tensor, nn

from benchmarks.step.measure import seconds
from fractrain_fx import Engine, FracConfig, FracModel, Precision, Steps, fractrainify
from fractrain_fx.numerics import watch
from fractrain_fx.zoo.models import resnet38

__all__ = ["main", "measure"]

_EVERY = 100  # the distance of watched steps whose cost is printed


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    for name, build in (("ResNet-38", resnet38), ("ViT-Tiny, depth 4", _vit)):
        for config in (
            FracConfig(method="static", precision=Precision(8, 8), format="affine"),
            FracConfig(method="static", precision=Precision(8, 8), format="mx"),
            FracConfig(method="static", precision=Precision(4, 4), format="nvfp4"),
        ):
            watched, between = measure(build, config, arguments.batch, arguments.rounds)
            print(
                f"{name}, {config.format}: a watched step takes {watched:.2f} steps, a step between {between:.3f}; "
                f"watching every {_EVERY} steps adds {100 * (watched - 1) / _EVERY:.2f} %"
            )


def measure(build: Callable[[], nn.Module], config: FracConfig, batch: int, rounds: int) -> tuple[float, float]:
    """The medians over rounds of a watched step, and of a step between, relative to a step of a model of its own."""
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    plain, ours = (_rewritten(build, config, images) for _ in range(2))
    steps = [_step(model, images, labels) for model in (plain, ours)]
    ratios: tuple[list[float], list[float]] = [], []
    with watch(ours, every=Steps(2)):
        for _ in range(rounds + 1):
            before, watched, between, after = (seconds(steps[index], "cpu") for index in (0, 1, 1, 0))
            for kept, taken in zip(ratios, (watched, between), strict=True):
                kept.append(2 * taken / (before + after))
    return median(ratios[0][1:]), median(ratios[1][1:])


def _vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, depth=4, num_classes=10)


def _rewritten(build: Callable[[], nn.Module], config: FracConfig, images: Tensor) -> FracModel:
    torch.manual_seed(0)
    return fractrainify(build(), config=config, example_inputs=(images[:2],))


def _step(model: FracModel, images: Tensor, labels: Tensor) -> Callable[[], None]:
    engine, optimizer = Engine(model), torch.optim.SGD(model.parameters(), 0.01)

    def step() -> None:
        engine.loss(nn.functional.cross_entropy(model(images), labels)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
