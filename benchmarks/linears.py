"""``python -m benchmarks.linears``: from which size is a linear layer quicker on whole codes than in float?

One linear layer of equal width in and out, forward and backward with all three products, at several precisions: in
float, under bfloat16 autocast, simulated, and on int8 (``backend="codes-always"``). int8 uses the units
for bytes of a processor, or C++ kernels on a CPU without such units.
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
from torch import Tensor, nn

from benchmarks.machine import describe
from benchmarks.page import markdown_table, write_section
from benchmarks.records import Quartiles, command, machine_words, quartiles, ratios, rich_table, spread
from benchmarks.step.measure import interleaved
from fractrain_fx import FracConfig, FracModel, Pin, Precision, RunConfig, fractrainify
from fractrain_fx.config import RECIPES

_NAME = "benchmarks.linears"
SIMULATED, CODES = RunConfig(backend="cpu"), RunConfig(backend="codes-always")
_PRECISIONS = ("3/6", "4/6", "6/8", "8/8", "8/16")

Times = Mapping[str, Sequence[float]]


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(argv)
    console = Console(width=max(Console().width, 150))
    by_shape: dict[tuple[int, int], Times] = {}
    for width in options.widths:
        for tokens in options.tokens:
            with console.status(f"width {width}, {tokens} tokens"):
                calls = steps(width, tokens, options.precisions, options.simulated, options.bf16, options.device)
                for call in calls.values():
                    call()
                by_shape[width, tokens] = interleaved(calls, options.rounds, options.device)
    names = [name for name in next(iter(by_shape.values())) if name != options.base]
    head = ("width", "tokens", f"{options.base}, ms", *names)
    rows = [_row(width, tokens, times, names, options.base) for (width, tokens), times in by_shape.items()]
    console.print(rich_table(f"a linear layer, ratios to {options.base}", head, rows, text_columns=0))
    told = crossovers(by_shape, options.base)
    for line in told:
        console.print(line, markup=False)
    if options.table:
        how = (
            f"`{command(_NAME, argv)}`; {machine_words(describe(options.device))}. Median (quartiles) of "
            f"{options.rounds} rounds; ratios are to the {options.base} step of the same round."
        )
        write_section(options.table, _NAME, "\n\n".join([how, markdown_table(head, rows), *told]))


def steps(
    width: int, tokens: int, precisions: Sequence[str], simulated: Sequence[str], bf16: bool, device: str
) -> dict[str, Callable[[], None]]:
    """The timed steps, each on a copy of the layer with the same weights and data.

    Args:
        width: channels in and out.
        tokens: rows of the input.
        precisions: precisions to multiply on int8.
        simulated: precisions to simulate.
        bf16: whether to run the float layer under bfloat16 autocast too.
        device: the device.
    """
    torch.manual_seed(0)
    layer = nn.Linear(width, width).to(device)
    x, g = torch.randn(tokens, width, device=device), torch.randn(tokens, width, device=device)
    return forms(layer, x, g, precisions, simulated, bf16)


def forms(
    layer: nn.Module, x: Tensor, g: Tensor, precisions: Sequence[str], simulated: Sequence[str], bf16: bool
) -> dict[str, Callable[[], None]]:
    """A step of a layer in each form."""
    calls = {"float": step(layer, x, g)}
    if bf16:
        calls["bf16"] = step(layer, x, g.bfloat16(), bf16=True)
    quantized: tuple[tuple[str, RunConfig, Sequence[str]], ...] = (
        ("simulated", SIMULATED, simulated),
        ("int8", CODES, precisions),
    )
    for name, run, texts in quantized:
        for text in texts:
            calls[f"{name} {text}"] = step(rewritten(layer, x, text, run), x, g)
    return calls


def crossovers(by_shape: Mapping[tuple[int, int], Times], base: str) -> list[str]:
    """For each form and width, the number of tokens from which it takes less time than ``base``, as measured."""
    lines = []
    for name in next(iter(by_shape.values())):
        if not name.startswith("int8"):
            continue
        parts = []
        for width in dict.fromkeys(width for width, _ in by_shape):
            tokens = sorted(count for its_width, count in by_shape if its_width == width)
            wins = [ratios(by_shape[width, count], name, base).median < 1 for count in tokens]
            if not wins[-1]:
                parts.append(f"never at width {width}")
            else:
                first = len(wins) - next((i for i, win in enumerate(reversed(wins)) if not win), len(wins))
                parts.append(f"from {tokens[first]:,} tokens on at width {width}")
        lines.append(f"{name} takes less time than {base} {', '.join(parts)}.")
    return lines


def rewritten(layer: nn.Module, x: Tensor, precision: str, run: RunConfig, recipe: str | None = None) -> FracModel:
    """The layer in a model that quantizes it."""
    bits = Precision.parse(precision)
    pins = (Pin("0", bits),)  # otherwise the first layer of a model stays float
    fmt = "affine" if recipe is None else RECIPES[recipe].format
    config = FracConfig(method="static", format=fmt, recipe=recipe, precision=bits, pins=pins, run=run)
    return fractrainify(nn.Sequential(layer), config=config, example_inputs=(x[:2],)).train()


def step(model: nn.Module, x: Tensor, g: Tensor, *, bf16: bool = False) -> Callable[[], None]:
    """Forward and backward, with ``g`` as the gradient of the output."""
    x = x.clone().requires_grad_()

    def run() -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
            out = model(x)
        out.backward(g)
        model.zero_grad()
        x.grad = None

    return run


def _row(width: int, tokens: int, times: Times, names: Sequence[str], base: str) -> list[str]:
    ms: Quartiles = quartiles([1000 * duration for duration in times[base]])
    return [f"{width}", f"{tokens:,}", spread(ms, 1), *(spread(ratios(times, name, base), 2) for name in names)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {_NAME}", description=__doc__)
    parser.add_argument("--widths", nargs="+", type=int, default=[512, 1024, 2048, 4096])
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 4096, 8192, 16384])
    parser.add_argument("--precisions", nargs="+", default=list(_PRECISIONS), metavar="FW/BW", help="on int8")
    parser.add_argument("--simulated", nargs="*", default=["8/8"], metavar="FW/BW")
    parser.add_argument("--bf16", action="store_true", help="time bfloat16 autocast too")
    parser.add_argument("--base", choices=("float", "bf16"), default="float", help="what ratios are to")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--table", type=Path, help=f"write between the {_NAME} markers of this Markdown page")
    return parser


if __name__ == "__main__":
    main()
