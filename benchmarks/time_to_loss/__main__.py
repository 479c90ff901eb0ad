"""``python -m benchmarks.time_to_loss``: wall time of a training to the same loss, by several methods at once.

A small Transformer learns the characters of Python's documentation: in float, under bfloat16 autocast, and with static
FW-8/BW-8, PFQ and FracTrain. These are simulated, and also run with ``backend="codes"`` and
``skipping="left-out"`` (names that end in ``-auto``),
which leaves out skipped samples and multiplies whole codes.
"""

from __future__ import annotations

from benchmarks.steady import steady

if __name__ == "__main__":
    steady()

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch
from rich.console import Console
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.machine import describe
from benchmarks.page import write_section
from benchmarks.records import command, read_json, write_json
from benchmarks.step.measure import processor_seconds, seconds
from benchmarks.step.methods import FIVE_OPTIONS
from benchmarks.time_to_loss.curves import Curve, Run, run_of
from benchmarks.time_to_loss.table import markdown, notes, rich_tables
from benchmarks.time_to_loss.training import BF16, METHODS, Text, Trainee, computes_bf16, probe, train
from fractrain_fx import FracConfig, RunConfig
from fractrain_fx.config import DFQ_OPTIONS, Backend, GateConfig
from fractrain_fx.native import kernels
from fractrain_fx.training.data.embedded import load_pydoc
from fractrain_fx.training.settings import TrainSettings
from fractrain_fx.zoo.models.transformer import TransformerLM

_NAME = "benchmarks.time_to_loss"
_HEAD_WIDTH = 64
_OPTIONS = {5: FIVE_OPTIONS, 7: DFQ_OPTIONS}


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(argv)
    console = Console(width=max(Console().width, 150))  # a log file must not cut numbers off
    if options.read is not None:
        held = read_json(options.read)
        if _NAME not in held:
            raise SystemExit(f"{options.read} holds no run: give the file that --json wrote")
        run = run_of(held[_NAME])
    else:
        run = measure(options, command(_NAME, argv), console)
        if options.json:
            write_json(options.json, {_NAME: run})
    for table in rich_tables(run):
        console.print(table)
    for line in notes(run):
        console.print(line, markup=False)
    if options.table:
        write_section(options.table, _NAME, markdown(run))


def measure(options: argparse.Namespace, how: str, console: Console) -> Run:
    """Train with all methods."""
    if options.clock == "processor" and torch.get_num_threads() != 1:
        raise SystemExit("--clock processor adds up all threads, also waiting ones: set OMP_NUM_THREADS=1")
    clock = processor_seconds if options.clock == "processor" else seconds
    if options.backend == "cpu":
        kernels()  # built now if needed, so that no step includes the build
    data = load_pydoc(options.length)
    assert isinstance(data.train, TensorDataset) and isinstance(data.test, TensorDataset)  # text always is
    text = Text.drawn(
        data.train, data.test, steps=options.steps, batch=options.batch, blocks=options.blocks, seed=options.seed
    )
    settings = TrainSettings(
        iterations=options.steps,
        epoch_steps=options.epoch,
        batch_size=options.batch,
        optimizer="adamw",
        lr=options.lr,
        seed=options.seed,
    )
    gate = GateConfig(beta=options.beta, control="sign", init="linear")  # as in the runs that are kept
    fractrain = FracConfig.paper(
        options=_OPTIONS[options.options], gate=gate, schedule="by-length", run=RunConfig(backend=options.backend)
    )
    torch.manual_seed(options.seed)
    start = _model(data.classes, options.width, options.layers)

    def made(method: str) -> Trainee:
        return Trainee(method, start, text, settings, fractrain)

    methods = list(dict.fromkeys(["float", *options.methods]))
    probed: list[Curve] = []
    if BF16 in methods and not _trains_bf16(options.bf16):
        methods.remove(BF16)
        reason = "this processor has no bfloat16 products" if options.bf16 == "auto" else "--bf16 probe"
        console.print(f"{BF16} is timed for {options.probe} steps and not trained: {reason}", markup=False)
        probed.append(probe(made(BF16), made("float"), rounds=options.probe, clock=clock, note=reason))
    curves = train(
        [made(method) for method in methods],
        steps=options.steps,
        every=options.every,
        clock=clock,
        tell=lambda line: console.print(line, markup=False, highlight=False),
    )
    kept = {name: value for name, value in vars(options).items() if name not in ("json", "read", "table")}
    title = (
        f"Transformer, width {options.width}, {options.layers} layers, on pydoc's characters in blocks of "
        f"{options.length}"
    )
    ordered = sorted([*curves, *probed], key=lambda curve: METHODS.index(curve.method))
    return Run(title, kept, how, describe("cpu"), ordered)


def _model(characters: int, width: int, layers: int) -> nn.Module:
    # No dropout: masks would differ between methods, and the text is not repeated often enough for overfitting.
    heads = max(1, width // _HEAD_WIDTH)
    return TransformerLM(characters, width=width, hidden=4 * width, layers=layers, heads=heads, dropout=0.0)


def _trains_bf16(choice: str) -> bool:
    return choice == "train" or (choice == "auto" and computes_bf16())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {_NAME}", description=__doc__)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="float is always one")
    parser.add_argument("--width", type=int, default=256, help="of the embedding, in heads of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="characters of a block: a sample")
    parser.add_argument("--batch", type=int, default=16, help="samples of a step")
    parser.add_argument("--steps", type=int, default=500, help="of each method")
    parser.add_argument("--epoch", type=int, default=10, help="steps after which FracTrain may move to another stage")
    parser.add_argument("--every", type=int, default=20, help="steps between two validations")
    parser.add_argument("--blocks", type=int, default=96, help="held-out samples of a validation")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate of AdamW, for all methods")
    parser.add_argument("--beta", type=float, default=1e-3, help="strength of FracTrain's cost term")
    parser.add_argument(
        "--options", type=int, choices=tuple(_OPTIONS), default=5, help="what FracTrain's gates choose from"
    )
    parser.add_argument("--backend", choices=get_args(Backend), default="cpu", help="of all methods")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument(
        "--bf16",
        choices=("auto", "train", "probe"),
        default="auto",
        help=f"whether {BF16} is trained or only timed for a few steps; auto: trained where the processor can",
    )
    parser.add_argument("--probe", type=int, default=3, help="steps of a method that is only timed")
    parser.add_argument(
        "--clock",
        choices=("wall", "processor"),
        default="wall",
        help="processor: time that the process computed (with OMP_NUM_THREADS=1), for machines that do other work too",
    )
    parser.add_argument("--json", type=Path, help="keep all curves here (packed where it ends with .gz)")
    parser.add_argument("--from", dest="read", type=Path, metavar="JSON", help="train nothing: show what is kept there")
    parser.add_argument("--table", type=Path, help=f"write between the {_NAME} markers of this Markdown page")
    return parser


if __name__ == "__main__":
    main()
