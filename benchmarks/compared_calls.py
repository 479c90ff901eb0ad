"""The share of a training that comparing calls with the model takes: ``python -m benchmarks.compared_calls``.

Two trainings: GPT-2 of two layers on texts of varying length, and a ResNet on images of one size. The time inside
comparisons is measured in the run that it is a share of.
"""

from __future__ import annotations

from benchmarks.steady import steady

if __name__ == "__main__":
    steady()

import argparse
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import timm
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from fractrain_fx import FracConfig, FracModel, fractrainify
from fractrain_fx.capture import Recording

_WORDS, _LONGEST = 256, 128


def texts(steps: int) -> tuple[FracModel, Iterator[Tensor]]:
    """A model, and its losses on batches of texts, each padded to the longest of its batch."""
    config = GPT2Config(vocab_size=_WORDS, n_positions=_LONGEST, n_embd=128, n_layer=2, n_head=4, use_cache=False)
    model = fractrainify(GPT2LMHeadModel(config), config=FracConfig(method="pfq"))
    lengths = random.Random(0)

    def losses() -> Iterator[Tensor]:
        for _ in range(steps):
            tokens = torch.randint(_WORDS, (8, lengths.randint(8, _LONGEST)))
            yield model(input_ids=tokens, labels=tokens).loss

    return model, losses()


def images(steps: int) -> tuple[FracModel, Iterator[Tensor]]:
    """A model, and its losses on batches of images of one size."""
    net = timm.create_model("resnet10t", num_classes=10)
    model = fractrainify(net, config=FracConfig(method="pfq"), example_inputs=(torch.randn(2, 3, 32, 32),))

    def losses() -> Iterator[Tensor]:
        for _ in range(steps):
            yield F.cross_entropy(model(torch.randn(32, 3, 32, 32)), torch.randint(10, (32,)))

    return model, losses()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    steps: int = parser.parse_args().steps
    spent, calls = 0.0, 0

    def timed(compare: Callable[..., str | None]) -> Callable[..., str | None]:
        def compared(*args: Any) -> str | None:
            nonlocal spent, calls
            begin = time.perf_counter()
            try:
                return compare(*args)
            finally:
                spent, calls = spent + time.perf_counter() - begin, calls + 1

        return compared

    for name in ("difference", "value_difference"):
        setattr(Recording, name, timed(getattr(Recording, name)))
    for name, make in (("texts of varying length", texts), ("images of one size", images)):
        torch.manual_seed(0)
        model, losses = make(steps)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        spent, calls, begin = 0.0, 0, time.perf_counter()
        for loss in losses:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        total = time.perf_counter() - begin
        print(f"{name}: {calls} comparisons, {100 * spent / (total - spent):.2f} % of {steps} steps in {total:.0f} s")


if __name__ == "__main__":
    main()
