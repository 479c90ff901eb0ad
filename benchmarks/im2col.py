"""``python -m benchmarks.im2col``: would 3x3 convolutions be quicker as int8 products of matrices?

For that the input becomes rows of nine bytes a channel (im2col), for the output and for the weight's gradient, and so
does the output's gradient, in two bytes, for the input's. Both parts are timed against the float convolution, forward
and backward: where im2col alone takes as long, no int8 unit, however quick, makes up for it. Products are taken as
``execution="auto"`` takes them: on units for bytes, or by the C++ kernels of a CPU that has none.
"""

from __future__ import annotations

from benchmarks.steady import steady

if __name__ == "__main__":
    steady()

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from benchmarks.machine import describe
from benchmarks.page import markdown_table, write_section
from benchmarks.records import Quartiles, command, machine_words, quartiles, ratios, rich_table, spread
from benchmarks.step.measure import interleaved
from fractrain_fx.native import kernels
from fractrain_fx.nn.tuning import Tuner

_NAME = "benchmarks.im2col"
_HEAD = ("channels x side", "values", "float, ms", "im2col", "im2col in bytes", "int8 products", "im2col + products")

# Channels and sides of the 3x3 convolutions of ResNet-38 at 32 pixels and of ResNet-18 at 64 and 224.
_SHAPES = ((16, 32), (32, 16), (64, 8), (64, 16), (128, 8), (256, 4), (64, 56), (128, 28), (256, 14))


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(argv)
    console = Console(width=max(Console().width, 130))
    rows = []
    for channels, side in options.shapes:
        with console.status(f"{channels} channels, {side} x {side}"):
            rows.append(_row(channels, side, options))
    console.print(rich_table("3x3 convolutions: parts of an int8 form to the float convolution", _HEAD, rows))
    if options.table:
        how = (
            f"`{command(_NAME, argv)}`; {machine_words(describe(options.device))}. Median (quartiles) of "
            f"{options.rounds} rounds; forward and backward of one convolution of {options.batch} samples. Ratios are "
            "to the float convolution of the same round."
        )
        write_section(options.table, _NAME, f"{how}\n\n{markdown_table(_HEAD, rows)}")


def parts(channels: int, side: int, batch: int, device: str) -> dict[str, Callable[[], object]]:
    """What is timed: the float convolution; im2col of floats and of bytes; the int8 products of what im2col gives."""
    x, g = (torch.randn(batch, channels, side, side, device=device) for _ in range(2))
    w = torch.randn(channels, channels, 3, 3, device=device)
    codes, of_g = (each.mul(30).clamp(-127, 127).to(torch.int8) for each in (x, g))
    rows, upright = columns(codes), of_g.movedim(1, -1).reshape(-1, channels)
    weight = w.mul(30).clamp(-127, 127).to(torch.int8).movedim(1, -1).flatten(1)
    by_kernels = Tuner("auto", compiled=True).multiplies(torch.device(device))
    # The two bytes of the output's gradient, beside one another or as one number.
    wide = of_g.to(torch.int16).mul_(256) if by_kernels else torch.cat([of_g, of_g], 1)
    g_rows = [columns(wide)] if by_kernels else [columns(limb) for limb in wide.chunk(2, 1)]
    multiply = _kernel if by_kernels else torch._int_mm

    def convolution() -> None:
        F.conv2d(x, w, padding=1)
        torch.ops.aten.convolution_backward(
            g, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
        )

    def products() -> None:
        multiply(rows, weight.t())
        multiply(upright.t(), rows)
        for each in g_rows:
            multiply(each, weight.t())

    return {
        "float": convolution,
        "im2col": lambda: (columns(x), columns(g)),
        "bytes": lambda: (columns(codes), columns(wide)),
        "products": products,
    }


def columns(x: Tensor) -> Tensor:
    """The 3x3 patches around each place, as rows: ``(batch * side * side, channels * 9)``."""
    batch, channels, height, width = x.shape
    padded = F.pad(x.movedim(1, -1), (0, 0, 1, 1, 1, 1))
    sample, row, column, channel = padded.stride()
    shape, strides = (batch, height, width, 3, 3, channels), (sample, row, column, row, column, channel)
    return padded.as_strided(shape, strides).reshape(-1, 9 * channels)


def _kernel(a: Tensor, b: Tensor) -> Tensor:
    one, none = torch.ones(()), torch.zeros(())
    found: Tensor = kernels().code_product(a, one, none, b, one, none, None, None)
    return found


def _row(channels: int, side: int, options: argparse.Namespace) -> list[str]:
    work = parts(channels, side, options.batch, options.device)
    for each in work.values():
        each()
    times = interleaved({name: _silent(each) for name, each in work.items()}, options.rounds, options.device)
    times["int8"] = [sum(pair) for pair in zip(times["bytes"], times["products"], strict=True)]
    ms: Quartiles = quartiles([1000 * each for each in times["float"]])
    shares = (spread(ratios(times, name, "float"), 2) for name in ("im2col", "bytes", "products", "int8"))
    return [f"{channels} x {side}", f"{options.batch * channels * side * side:,}", spread(ms, 2), *shares]


def _silent(work: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        work()

    return run


def _shape(text: str) -> tuple[int, int]:
    channels, _, side = text.partition("x")
    return int(channels), int(side)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {_NAME}", description=__doc__)
    parser.add_argument("--shapes", nargs="+", type=_shape, default=_SHAPES, metavar="CHANNELSxSIDE")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--table", type=Path, help=f"write between the {_NAME} markers of this Markdown page")
    return parser


if __name__ == "__main__":
    main()
