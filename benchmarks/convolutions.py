"""``python -m benchmarks.convolutions``: when is a 3x3 convolution quicker on whole codes than in float?

A convolution with equally many channels in and out at stride 1, forward and backward with all three products: in float,
under bfloat16 autocast, simulated, and on codes (``backend="codes-always"``).
"""

from __future__ import annotations

from benchmarks.steady import steady

if __name__ == "__main__":
    steady()

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from benchmarks.linears import Times, forms
from benchmarks.machine import describe
from benchmarks.page import markdown_table, write_section
from benchmarks.records import Quartiles, command, machine_words, quartiles, ratios, rich_table, spread
from benchmarks.step.measure import interleaved

_NAME = "benchmarks.convolutions"
_SHAPES = ((16, 32), (32, 16), (64, 8), (64, 16), (128, 8), (256, 4), (512, 2), (64, 56), (128, 28), (256, 14))


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(argv)
    console = Console(width=max(Console().width, 150))
    by_shape: dict[tuple[int, int], Times] = {}
    for channels, side in options.shapes:
        with console.status(f"{channels} channels, {side} x {side}"):
            calls = steps(channels, side, options.batch, options.precisions, options.bf16)
            for call in calls.values():
                call()
            by_shape[channels, side] = interleaved(calls, options.rounds, "cpu")
    names = [name for name in next(iter(by_shape.values())) if name != "float"]
    head = ("channels x side", "values", "float, ms", *names)
    rows = [_row(*shape, options.batch, times, names) for shape, times in by_shape.items()]
    console.print(rich_table("a 3x3 convolution, ratios to float", head, rows, text_columns=1))
    if options.table:
        how = (
            f"`{command(_NAME, argv)}`; {machine_words(describe('cpu'))}. Median (quartiles) of {options.rounds} "
            f"rounds; forward and backward of one convolution of {options.batch} samples. Ratios are to the float "
            "convolution of the same round."
        )
        write_section(options.table, _NAME, f"{how}\n\n{markdown_table(head, rows)}")


def steps(
    channels: int, side: int, batch: int, precisions: Sequence[str], bf16: bool
) -> Mapping[str, Callable[[], None]]:
    """The timed steps, each on a copy of the convolution with the same weights and data.

    Args:
        channels: channels in and out.
        side: side of the images.
        batch: number of images.
        precisions: precisions to simulate, and to multiply on codes.
        bf16: whether to run the float convolution under bfloat16 autocast too.
    """
    torch.manual_seed(0)
    layer = nn.Conv2d(channels, channels, 3, padding=1)
    x, g = torch.randn(batch, channels, side, side).relu(), torch.randn(batch, channels, side, side)
    return forms(layer, x, g, precisions, precisions, bf16)


def _row(channels: int, side: int, batch: int, times: Times, names: Sequence[str]) -> list[str]:
    ms: Quartiles = quartiles([1000 * duration for duration in times["float"]])
    shares = (spread(ratios(times, name, "float"), 2) for name in names)
    return [f"{channels} x {side}", f"{batch * channels * side * side:,}", spread(ms, 2), *shares]


def _shape(text: str) -> tuple[int, int]:
    channels, _, side = text.partition("x")
    return int(channels), int(side)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {_NAME}", description=__doc__)
    parser.add_argument("--shapes", nargs="+", type=_shape, default=_SHAPES, metavar="CHANNELSxSIDE")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--precisions", nargs="+", default=["4/8", "8/8"], metavar="FW/BW")
    parser.add_argument("--bf16", action="store_true", help="time bfloat16 autocast too")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--table", type=Path, help=f"write between the {_NAME} markers of this Markdown page")
    return parser


if __name__ == "__main__":
    main()
