"""``python -m benchmarks.roofline``: the roofline of this processor against measured products and training steps.

The processor is measured in the same rounds as what it is compared with, so that a busy machine slows both alike. With
one thread the clock is processor time.
"""

from __future__ import annotations

from benchmarks.steady import steady

if __name__ == "__main__":
    steady()

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import timm
import torch
from rich.console import Console
from torch import nn

from benchmarks.machine import describe
from benchmarks.page import markdown_table, write_section
from benchmarks.records import command, machine_words, rich_table
from benchmarks.step.measure import interleaved, processor_seconds, seconds
from fractrain_fx import FracConfig, FracModel, fractrainify
from fractrain_fx.hardware.machine import Choice
from fractrain_fx.hardware.measured import cpu_of, probes
from fractrain_fx.hardware.plan import plan_steps
from fractrain_fx.hardware.roofline import Roofline
from fractrain_fx.passes import Op, Product

_NAME = "benchmarks.roofline"
_SHAPES = ((2048, 512, 512), (4096, 256, 1024), (1024, 1024, 256), (8192, 128, 128), (16384, 64, 64))

Run = Callable[[], object]
Compared = tuple[str, float, float]


def main(argv: Sequence[str] | None = None) -> list[Compared]:
    """Print and return what was compared: its name, and measured and computed seconds."""
    argv = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(argv)
    torch.manual_seed(0)
    shapes = _SHAPES[: options.shapes]
    runs: dict[str, Run] = dict(probes())
    products: dict[str, Op] = {}
    for rows, inputs, outputs in shapes:
        name = f"{rows} x {inputs} x {outputs}"
        runs[name], products[name] = _matmul(rows, inputs, outputs)
    planned: dict[str, tuple[FracModel, int]] = {}
    for name, build in list(_STEPS.items())[: options.steps]:
        model, x = build(options.batch)
        config = FracConfig(method="float")
        planned[name] = fractrainify(model, config=config, example_inputs=(x[:2],), check=False), len(x)
        runs[name] = _step(model, x)
    for run in runs.values():
        run()
    clock = processor_seconds if torch.get_num_threads() == 1 else seconds
    times = interleaved(runs, options.rounds, "cpu", clock=clock)
    medians = {name: median(durations) for name, durations in times.items()}
    machine = cpu_of(medians)
    compared = [(name, medians[name], _computed(machine, op)) for name, op in products.items()]
    for name, (rewritten, batch) in planned.items():
        computed = plan_steps(rewritten, machine, batch)[0].seconds
        assert computed is not None  # a roofline prices everything
        compared.append((name, medians[name], computed))
    _show(compared, machine, options.table, argv)
    return compared


def _matmul(rows: int, inputs: int, outputs: int) -> tuple[Run, Op]:
    a, b = torch.randn(rows, inputs), torch.randn(inputs, outputs)
    product = Product(1, 1, 1, 1, inputs, outputs, rows=rows)
    op = Op("product", "mm", "", product.macs, input_gradient=False, weight_gradient=False, product=product)
    return lambda: a @ b, op


def _computed(machine: Roofline, op: Op) -> float:
    return machine.step([op], {op.name: (Choice(),)}).seconds


def _feed_forward(batch: int) -> tuple[nn.Module, torch.Tensor]:
    layers = (nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4))
    return nn.Sequential(*layers), torch.randn(128 * batch, 512)


def _vit(batch: int, name: str, side: int) -> tuple[nn.Module, torch.Tensor]:
    return timm.create_model(f"{name}_patch16_224", img_size=side), torch.randn(batch, 3, side, side)


def _images(batch: int, name: str, side: int) -> tuple[nn.Module, torch.Tensor]:
    return timm.create_model(name, num_classes=10), torch.randn(batch, 3, side, side)


_STEPS: dict[str, Callable[[int], tuple[nn.Module, torch.Tensor]]] = {
    "4 layers of 512": _feed_forward,
    "ViT-Tiny, 64 pixels": partial(_vit, name="vit_tiny", side=64),
    "ResNet-18, 64 pixels": partial(_images, name="resnet18", side=64),
    "ResNet-18, 128 pixels": partial(_images, name="resnet18", side=128),
    # Models that nothing in the roofline was chosen by:
    "ViT-Small, 112 pixels": partial(_vit, name="vit_small", side=112),
    "ResNet-34, 96 pixels": partial(_images, name="resnet34", side=96),
    "ResNet-50, 96 pixels": partial(_images, name="resnet50", side=96),
    "MobileNetV2, 96 pixels": partial(_images, name="mobilenetv2_100", side=96),
}


def _step(model: nn.Module, x: torch.Tensor) -> Run:
    model.train()

    def run() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return run


def _show(compared: Sequence[Compared], machine: Roofline, table: Path | None, argv: Sequence[str]) -> None:
    peak, memory = machine.peak["float32"] / 1e9, machine.bandwidth / 1e9
    load = f"load average {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
    about = f"{machine_words(describe('cpu'))}; {load}. {peak:.1f} x 10^9 operations a second, {memory:.1f} GB/s."
    head = ("float32", "measured, ms", "computed, ms", "ratio")
    rows = [
        (name, f"{1000 * measured:.2f}", f"{1000 * computed:.2f}", f"{computed / measured:.2f}")
        for name, measured, computed in compared
    ]
    console = Console(width=max(Console().width, 100))
    console.print(rich_table("measured and computed", head, rows))
    console.print(about, markup=False)
    if table:
        how = f"`{command(_NAME, argv)}`; {about}"
        write_section(table, _NAME, f"{how}\n\n{markdown_table(head, rows)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=16, help="samples of the training steps")
    parser.add_argument("--steps", type=int, default=len(_STEPS), help="how many of the training steps to time")
    parser.add_argument("--shapes", type=int, default=len(_SHAPES), help="how many of the products to time")
    parser.add_argument("--table", type=Path, help=f"write between the {_NAME} markers of this Markdown page")
    return parser


if __name__ == "__main__":
    main()
