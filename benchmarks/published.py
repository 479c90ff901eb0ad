"""``python -m benchmarks.published``: published training steps of single GPUs beside what the roofline computes.

Models are planned on the meta device, so nothing is trained. The published steps hold the loss and the optimizer, which
the roofline leaves out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import timm
import torch
from rich.console import Console

from benchmarks.page import markdown_table, write_section
from benchmarks.records import rich_table
from fractrain_fx import FracConfig, plan

_NAME = "benchmarks.published"

_TIMM = "timm (huggingface/pytorch-image-models), results/benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv"
_NVIDIA = "NVIDIA DeepLearningExamples, PyTorch ResNet-50 v1.5, training performance on DGX A100 (8x A100 80GB), 1 GPU"


@dataclass(frozen=True)
class Published:
    """A training step that somebody measured: model of timm at 224 pixels, machine, batch, type, milliseconds."""

    model: str
    machine: str
    batch: int
    floats: str
    ms: float
    source: str


# The batch of NVIDIA's runs is that of its configs.yml, which runs tf32 without channels_last.
STEPS = (
    Published("resnet18", "rtx3090", 512, "bfloat16", 146.713, _TIMM),
    Published("resnet50", "rtx3090", 512, "bfloat16", 419.528, _TIMM),
    Published("vgg16", "rtx3090", 384, "bfloat16", 702.994, _TIMM),
    Published("vit_small_patch16_224", "rtx3090", 384, "bfloat16", 362.157, _TIMM),
    Published("vit_base_patch16_224", "rtx3090", 192, "bfloat16", 487.729, _TIMM),
    Published("convnext_tiny", "rtx3090", 256, "bfloat16", 311.536, _TIMM),
    Published("resnet50", "a100", 256, "bfloat16", 1000 * 256 / 2470, _NVIDIA),
    Published("resnet50", "a100", 256, "tf32", 1000 * 256 / 938, _NVIDIA),
)


def computed_ms(step: Published) -> float:
    """What the roofline computes; mixed precision is priced as bfloat16, which is as quick as float16."""
    rows = _planned(step.model, step.machine, step.batch)
    return 1000 * rows[step.floats]


@cache
def _planned(model: str, machine: str, batch: int) -> dict[str, float]:
    with torch.device("meta"):
        made, x = timm.create_model(model), torch.empty(2, 3, 224, 224)
    config = FracConfig(method="static")  # which opens fused attention: it was not fused when these steps were timed
    planned = plan(made, config=config, example_inputs=(x,), machine=machine, batch=batch)
    return {row.precision: row.seconds for row in planned.steps if row.seconds is not None}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {_NAME}", description=__doc__)
    parser.add_argument("--table", type=Path, help=f"write between the {_NAME} markers of this Markdown page")
    options = parser.parse_args(argv)
    rows = list(_rows())
    head = ("model", "machine", "batch", "type", "published, ms", "computed, ms", "ratio")
    Console(width=max(Console().width, 100)).print(rich_table("training steps", head, rows))
    if options.table:
        write_section(options.table, _NAME, markdown_table(head, rows))


def _rows() -> Iterator[tuple[str, ...]]:
    for step in STEPS:
        ms = computed_ms(step)
        batch, floats = str(step.batch), "mixed" if step.floats == "bfloat16" else step.floats
        yield step.model, step.machine, batch, floats, f"{step.ms:.0f}", f"{ms:.0f}", f"{ms / step.ms:.2f}"


if __name__ == "__main__":
    main()
