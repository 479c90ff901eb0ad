"""What rewriting costs: against a training step of the model, and for each node as models get deeper."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import timm
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fractrain_fx import FracModel, fractrainify


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def step(model: nn.Module, x: Tensor) -> None:
    model.train()
    model(x).sum().backward()
    model.zero_grad(set_to_none=True)


def against_a_step(name: str, rounds: int = 5) -> tuple[float, float]:
    """Median seconds of one forward and backward at batch 2, and of the rewrite with its self-check, interleaved."""
    model, x = timm.create_model(name), torch.randn(2, 3, 224, 224)
    step(model, x)
    steps, rewrites = [], []
    for _ in range(rounds):
        steps.append(seconds(lambda: step(model, x)))
        rewrites.append(seconds(lambda: fractrainify(model, example_inputs=(x,))))
    return statistics.median(steps), statistics.median(rewrites)


def for_each_node(depth: int, rounds: int = 3) -> tuple[int, float, float]:
    """Nodes of a ViT's rewritten graph, and milliseconds for each: recording and passes alone, then with the check."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=depth)
    x = torch.randn(2, 3, 32, 32)
    rewritten: list[FracModel] = []
    bare, checked = [], []
    for _ in range(rounds):
        bare.append(seconds(lambda: rewritten.append(fractrainify(model, example_inputs=(x,), check=False))))
        checked.append(seconds(lambda: fractrainify(model, example_inputs=(x,))))
    nodes = len(rewritten[0].graph.nodes)
    return nodes, 1000 * statistics.median(bare) / nodes, 1000 * statistics.median(checked) / nodes


def main() -> None:
    console = Console()
    table = Table(title="fractrainify, self-check included, against forward + backward at batch 2 (224 pixels)")
    for column in ("model", "step, s", "rewrite, s", "rewrite / step", "5 steps + 1 s"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name in ("resnet18", "resnet50"):
        one, rewrite = against_a_step(name)
        table.add_row(name, f"{one:.2f}", f"{rewrite:.2f}", f"{rewrite / one:.1f}", f"{5 * one + 1:.2f}")
    console.print(table)
    table = Table(title="ViT at 32 pixels: time for each node of the rewritten graph")
    for column in ("depth", "nodes", "record + passes, ms a node", "with self-check, ms a node"):
        table.add_column(column, justify="right")
    for depth in (6, 12, 24, 48):
        nodes, bare, checked = for_each_node(depth)
        table.add_row(str(depth), str(nodes), f"{bare:.2f}", f"{checked:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
