"""What the ``fractrain`` command understands, and what it says to what it does not understand."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import NoReturn

from jsonargparse import ArgumentParser

from fractrain_fx.errors import near
from fractrain_fx.training.flags import add_flags, as_setting

__all__ = ["COMMANDS", "Parser", "make_parser"]

_BAD_VALUE = re.compile(r"Parser key \"([^\"]+)\"[^:]*:\s+Expected a <class '(\w+)'>\. Got value: (.*)", re.DOTALL)
COMMANDS = {
    "train": "train a model and report its cost",
    "plan": "what would be rewritten",
    "inspect": "what a rewritten model consists of",
    "compare": "a rewritten model beside its float twin",
    "machines": "machines that a plan can be computed on",
    "zoo": "the paper's models, runs and tables",
    "report": "trajectories, stages, bits and cost of runs, as one HTML file",
    "sensitivity": "which op is hurt by few bits, and widths under a budget",
    "export": "a trained model for onnxruntime, transformers or torchao",
    "build": "build the C++ kernels that make training on a CPU quicker",
}
"""The help of each command, by its name."""

_KINDS = {"int": "a whole number", "float": "a number"}
_TRAIN = """Train a model; without flags, a small timm ResNet on the embedded digits with FracTrain.

examples:
  fractrain train --method pfq --epochs 10
  fractrain train --model timm:resnet18 --data cifar10 --data-dir ~/data --as paper
  fractrain train --recipe table3-resnet38-cifar10-fractrain --seed 1 --set gate.beta=1e-3
  fractrain train --config run.yaml --out runs/mine
  fractrain train --resume runs/mine"""
_BAD_CHOICE = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)")


class Parser(ArgumentParser):
    """A parser that answers a mistake in one line, with the flags or words that are nearest to it."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print what is wrong and exit with code 2."""
        parser = getattr(ex, "subcommand_parser", None) or self
        lines = "; ".join(_told(message, parser))
        sys.stderr.write(f"{parser.prog}: {lines}\n'{parser.prog} --help' lists what it takes\n")
        self.exit(2)


def _told(message: str, parser: ArgumentParser) -> Iterator[str]:
    """A parser's message in words."""
    _, unknown, words = message.partition("unrecognized arguments: ")
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        parts = words.split(" ")
        flags = [word.partition("=")[0] for word in parts if word.startswith("-")]
        yield from (f"{flag} is unknown.{as_setting(flag) or near(flag, known, 1)}" for flag in flags)
        if not flags:
            yield f"{' '.join(parts)!r} belongs to no flag"
    elif match := _BAD_VALUE.search(message):
        name, kind, value = match.groups()
        flag = "--" + name.rpartition(" ")[2].replace("_", "-")
        yield f"{flag} {value.strip()} is not {_KINDS.get(kind, kind)}"
    elif match := _BAD_CHOICE.search(message):
        word, choices = match.groups()
        known = [choice.strip("'") for choice in choices.split(", ")]
        yield f"{word!r} is unknown: write one of {', '.join(known)}.{near(word, known)}"
    elif "are required: " in message:
        names = message.rpartition(": ")[2].split(", ")
        yield f"{', '.join(name.rpartition('.')[2].upper() for name in names)} is missing"
    elif 'expected "command"' in message:
        yield f"no command: write one of {', '.join(COMMANDS)}"
    else:
        yield message.replace("\n", " ")


def _new(usage: str, description: str) -> Parser:
    return Parser(
        prog="fractrain",
        usage=f"%(prog)s {usage}".rstrip(),
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _switch(parser: Parser, flag: str, text: str) -> None:
    """Add a flag without a value; ``None`` if it is not given."""
    parser.add_argument(flag, action="store_true", default=None, help=text)


def _model(parser: Parser) -> None:
    """Add the name of a model."""
    text = "timm:NAME, hf:TYPE, zoo:NAME or FILE.py:FUNCTION"
    parser.add_argument("model", metavar="MODEL", type=str, help=text)


def make_parser() -> Parser:
    """The parser of the ``fractrain`` command, with one of its own for each subcommand."""
    parser = _new("COMMAND ...", "Train PyTorch models with fractional precision (FracTrain, NeurIPS 2020).")
    parser.add_argument("--version", action="version", version=f"fractrain_fx {metadata.version('fractrain_fx')}")
    commands = parser.add_subcommands(required=True, dest="command", metavar="COMMAND")

    def add(name: str, command: Parser) -> None:
        _switch(command, "--debug", "show the traceback of an error")
        commands.add_subcommand(name, command, help=COMMANDS[name])
        command.prog = f"fractrain {name}"

    train = _new("[FLAGS]", _TRAIN)
    train.add_argument("--out", metavar="DIR", type=str, help="folder of the run (default: a new one under runs/)")
    train.add_argument("--resume", metavar="DIR", type=str, help="continue the run in this folder")
    text_watch = (
        "measure what rounding does to every op, every N batches, into numerics.jsonl (docs/how-to/numerics.md)"
    )
    train.add_argument("--watch", metavar="N", type=int, help=text_watch)
    add_flags(train)
    add("train", train)

    plan = _new("MODEL [FLAGS]", "Show what would be rewritten, and why, without rewriting anything.")
    inspect = _new("MODEL [FLAGS]", "Rewrite a model and show the result.")
    for command in (plan, inspect):
        _model(command)
        _switch(command, "--ops", "list every contraction")
        text_shapes = "show the shapes of every tensor that enters or leaves a block"
        _switch(command, "--shapes", text_shapes)
        _switch(command, "--json", "print JSON")
        if command is inspect:
            text_draw = "also draw it into FILE (.svg, .png, .pdf, .dot, .graphml); with --ops, every contraction"
            command.add_argument("--draw", metavar="FILE", type=str, help=text_draw)
        else:
            text_machine = "also compute what a training step takes on this machine ('fractrain machines' lists them)"
            command.add_argument("--machine", metavar="NAME", type=str, help=text_machine)
            command.add_argument("--batch", metavar="N", type=int, help="samples of that step (default: 128)")
        add_flags(command, loop=False)
        add("plan" if command is plan else "inspect", command)

    compare = _new(
        "MODEL [FLAGS]",
        "Run one batch through a rewritten model and its float twin, and name the ops that differ.",
    )
    _model(compare)
    compare.add_argument("--bound", metavar="ERROR", type=float, help="rounding error that is named (default: 0.4)")
    _switch(compare, "--json", "print JSON")
    add_flags(compare, loop=False)
    add("compare", compare)

    machines = _new("[--json]", "List the machines that --machine takes, with their figures and where those come from.")
    _switch(machines, "--json", "print JSON")
    add("machines", machines)

    zoo = _new(
        "list|show|table [NAME] [FLAGS]",
        "The paper's models and runs: list them all, show a run's settings and numbers, or compare a table with ours.",
    )
    zoo.add_argument("action", choices=["list", "show", "table"], type=str, help="what to do")
    zoo.add_argument(
        "name", nargs="?", metavar="NAME", type=str, help="run to show, or table: 1 to 5, supplement-1, figure-3, ..."
    )
    zoo.add_argument("--runs", metavar="DIR", nargs="+", type=str, help="folders of runs to put beside a table's rows")
    _switch(zoo, "--json", "print JSON")
    zoo.add_argument("--into", metavar="FILE", type=str, help="renew the table in this Markdown file instead")
    add("zoo", zoo)

    report = _new(
        "[NAME=]RUN ... [FLAGS]", "Write one HTML file about runs, side by side: it needs no network and no other file."
    )
    report.add_argument(
        "runs", metavar="[NAME=]RUN", nargs="+", type=str, help="folder of a run, or its metrics file; maybe a name"
    )
    report.add_argument(
        "--out", metavar="FILE", default="report.html", type=str, help="the file (default: %(default)s)"
    )
    report.add_argument("--plots", metavar="DIR", type=str, help="write every plot as SVG and PNG too")
    report.add_argument("--epochs", metavar="N", nargs="+", type=int, help="epochs of the bit allocation plots")
    add("report", report)
    sensitivity = _new(
        "RUN [FLAGS]", "Estimate what rounding each operand of each op does to the loss of a trained model."
    )
    text_run = "folder of a run, or the file that --out wrote"
    sensitivity.add_argument("run", metavar="RUN", type=str, help=text_run)
    sensitivity.add_argument("--batches", metavar="N", type=int, help="training batches to measure on (default: 8)")
    sensitivity.add_argument("--out", metavar="FILE", type=str, help="write the numbers as JSON")
    sensitivity.add_argument("--draw", metavar="FILE", type=str, help="draw a heat map as SVG")
    text_budget = (
        "also choose widths that cost no more: FW-4/BW-6, or cp_total in per cent; FW(3,8)/BW(6,8) for two stages"
    )
    sensitivity.add_argument("--budget", metavar="COST", type=str, help=text_budget)
    text_stages = "choose widths for so many stages of pfq, whose budgets rise to the last"
    sensitivity.add_argument("--stages", metavar="N", type=int, help=text_stages)
    text_allocation = "write these widths as settings for fractrain train --config"
    sensitivity.add_argument("--allocation", metavar="FILE", type=str, help=text_allocation)
    text_write = (
        "for torchtitan, megatron, transformer-engine or torchao: write which layers stay in bf16 under the budget"
    )
    sensitivity.add_argument("--write", metavar=("TRAINER", "FILE"), nargs=2, type=str, help=text_write)
    add("sensitivity", sensitivity)
    export = _new(
        "RUN --to FORMAT [FLAGS]",
        "Write a trained model, with the precision that it was trained with, for other libraries.",
    )
    text_run = "folder of a run, or of a model that save_pretrained wrote"
    export.add_argument("run", metavar="RUN", type=str, help=text_run)
    formats = ["onnx", "compressed-tensors", "torchao"]
    export.add_argument("--to", choices=formats, required=True, type=str, help="the format")
    export.add_argument("--out", metavar="DIR", type=str, help="folder of the files (default: export-FORMAT in RUN)")
    export.add_argument("--model", metavar="MODEL", type=str, help="architecture, where a saved model does not name it")
    text_stage = "precision of all that the stage steers, such as 8/8, or the number of a stage (-1: the last)"
    export.add_argument("--stage", metavar="STAGE", type=str, help=text_stage)
    text_levels = "levels of format affine: those of evaluation, or those that integer kernels multiply"
    export.add_argument("--levels", choices=["exact", "integer"], default="exact", type=str, help=text_levels)
    text_choices = "fix the option that most test samples choose in each gated block, and say what that costs"
    _switch(export, "--commonest", text_choices)
    text_fold = "fold batch norms into the convolutions before them (onnx)"
    _switch(export, "--fold-batch-norm", text_fold)
    text_weights = "write weights so that onnxruntime prepares them once, as it loads the file (onnx)"
    _switch(export, "--fold-weights", text_weights)
    add("export", export)
    build = _new("", "Build the C++ kernels that round on a CPU, once: run.backend=auto then uses them.")
    add("build", build)
    return parser
