"""The cost of rewriting: against a training step, for each node as models get deeper, and for a model without data.

``--scale`` only measures the last: LLaMA-7B on the meta device, each run in a separate process.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence

import timm
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.step.measure import seconds
from fractrain_fx import FracModel, fractrainify, plan


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
        steps.append(seconds(lambda: step(model, x), "cpu"))
        rewrites.append(seconds(lambda: fractrainify(model, example_inputs=(x,)), "cpu"))
    return statistics.median(steps), statistics.median(rewrites)


def for_each_node(depth: int, rounds: int = 3) -> tuple[int, float, float]:
    """Nodes of a ViT's rewritten graph, and milliseconds for each: recording and passes, without and with the check."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=depth)
    x = torch.randn(2, 3, 32, 32)
    made: list[FracModel] = []
    bare, checked = [], []
    for _ in range(rounds):
        bare.append(seconds(lambda: made.append(fractrainify(model, example_inputs=(x,), check=False)), "cpu"))
        checked.append(seconds(lambda: fractrainify(model, example_inputs=(x,)), "cpu"))
    nodes = len(made[0].graph.nodes)
    return nodes, 1000 * statistics.median(bare) / nodes, 1000 * statistics.median(checked) / nodes


def without_data(layers: int, width: int = 4096) -> dict[str, float]:
    """Plan and rewrite a LLaMA of 7B's proportions on the meta device: seconds, nodes, this process's peak memory."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11008 // 4096,
        num_hidden_layers=layers,
        num_attention_heads=width // 128,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    made: list[FracModel] = []
    planning = seconds(lambda: plan(model), "cpu")
    rewriting = seconds(lambda: made.append(fractrainify(model)), "cpu")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "layers": layers,
        "parameters": sum(p.numel() for p in model.parameters()),
        "nodes": len(made[0].graph.nodes),
        "plan_s": planning,
        "rewrite_s": rewriting,
        "peak_gib": peak,
    }


def scale(console: Console) -> None:
    table = Table(title="LLaMA of 7B proportions on the meta device")
    for column in ("layers", "parameters", "nodes", "plan, s", "rewrite, s", "rewrite, ms a node", "peak memory, GiB"):
        table.add_column(column, justify="right")
    for layers in (8, 16, 32, 64, 128):
        # A separate process, because peak memory is over the whole life of a process.
        run = [sys.executable, "-m", "benchmarks.rewrite", "--layers", str(layers)]
        row = json.loads(subprocess.run(run, capture_output=True, text=True, check=True).stdout)
        per_node = f"{1000 * row['rewrite_s'] / row['nodes']:.2f}"
        numbers = (f"{row['plan_s']:.2f}", f"{row['rewrite_s']:.2f}", per_node, f"{row['peak_gib']:.2f}")
        table.add_row(str(layers), f"{row['parameters'] / 1e9:.2f}e9", str(row["nodes"]), *numbers)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rewrite", description=__doc__)
    parser.add_argument("--scale", action="store_true", help="only the models without data")
    parser.add_argument("--layers", type=int, help="only one such model of that depth, as JSON")
    options = parser.parse_args(argv)
    console = Console()
    if options.layers:
        print(json.dumps(without_data(options.layers)))
        return
    if not options.scale:
        with_data(console)
    scale(console)


def with_data(console: Console) -> None:
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
