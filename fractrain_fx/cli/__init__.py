"""The ``fractrain`` command: train, plan, inspect, compare, machines, zoo, report, sensitivity, export, build.

Each command imports the heavy modules that it needs, so that ``fractrain --help`` answers at once.
"""

from __future__ import annotations

import json
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fractrain_fx.errors import ConfigError, FracTrainError, FracTrainWarning

if TYPE_CHECKING:
    from torch import nn

    from fractrain_fx.drawing.build import Level

__all__ = ["exit_code", "main"]

_BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``; returns the exit code: 0, 2 for bad input, 130 after Ctrl-C, 143 after SIGTERM."""
    try:
        return _command(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt as interrupt:  # also while heavy modules are imported
        print("interrupted", file=sys.stderr)
        return exit_code(interrupt)


def _command(argv: list[str]) -> int:
    from fractrain_fx.cli.parser import make_parser

    arguments = make_parser().parse_args(argv).as_dict()
    chosen: dict[str, Any] = arguments[arguments["command"]]
    chosen["given"] = argv
    commands: dict[str, Callable[[dict[str, Any]], int | None]] = {
        "train": _train,
        "plan": partial(_show, rewrite=False),
        "inspect": partial(_show, rewrite=True),
        "compare": _compare,
        "machines": _machines,
        "zoo": _zoo,
        "report": _report,
        "sensitivity": _sensitivity,
        "export": _export,
        "build": _build,
    }
    try:
        with _plain_warnings(arguments["command"]):
            return commands[arguments["command"]](chosen) or 0
    except FracTrainError as error:
        if chosen.get("debug"):
            raise
        print(f"fractrain {arguments['command']}: {error}", file=sys.stderr)
        return _BAD_INPUT


@contextmanager
def _plain_warnings(command: str) -> Iterator[None]:
    """Print this package's warnings like its errors: the place of one in a file of the package tells a user nothing."""
    usual, package = warnings.formatwarning, Path(__file__).parents[1]

    def words(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if issubclass(category, FracTrainWarning) and package in Path(filename).parents:
            return f"fractrain {command}: {message}\n"
        return usual(message, category, filename, lineno, line)

    warnings.formatwarning = words
    try:
        yield
    finally:
        warnings.formatwarning = usual


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """The exit code of shells for a program that a signal ended: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + int(interrupt.args[0] if interrupt.args else signal.SIGINT)


def _train(arguments: dict[str, Any]) -> int:
    from fractrain_fx.training.interrupt import raise_interrupt
    from fractrain_fx.training.processes import end_processes

    signal.signal(signal.SIGTERM, raise_interrupt)  # a stopped job ends like Ctrl-C
    try:
        return _run(arguments)
    finally:
        end_processes()  # only after every local reference to the Trainer is gone


def _run(arguments: dict[str, Any]) -> int:
    from fractrain_fx.cli.export import deployment
    from fractrain_fx.training.flags import given_settings, settings_of, settings_text
    from fractrain_fx.training.log import new_console
    from fractrain_fx.training.log.records import keep_start
    from fractrain_fx.training.log.results import results_table
    from fractrain_fx.training.run import hold_folder, new_run, resume_run

    if arguments["set"] == ["help"]:
        print(settings_text())
        return 0
    if arguments["watch"] is not None and arguments["watch"] < 1:
        raise ConfigError(
            f"--watch {arguments['watch']} is not a number of batches: write --watch 100, or leave it out"
        )
    console = new_console()
    out: Path | None = None
    try:
        if arguments["resume"] is not None:
            also = [name for name in ("config", "as", "out") if arguments[name] is not None] + list(
                given_settings(arguments)
            )
            if also:
                raise ConfigError(f"--resume goes on with the run's own settings: leave out {', '.join(also)}")
            out = Path(arguments["resume"])
            trainer = resume_run(out, console)
        else:
            settings = settings_of(arguments)
            held = hold_folder(settings, None if arguments["out"] is None else Path(arguments["out"]))
            out = held.path
            trainer = new_run(settings, held, console)
        trainer.watched_every = arguments["watch"]
        if trainer.is_main:
            keep_start(out, trainer.start(arguments["given"]))
        result = trainer.fit()
    except KeyboardInterrupt as interrupt:
        _say_interrupted(out)
        return exit_code(interrupt)
    if trainer.is_main:
        console.print(results_table([result]))
        console.print(f"run folder: {out}", highlight=False, soft_wrap=True)
        if hint := deployment(out, trainer.model):
            console.print(hint, highlight=False, markup=False, soft_wrap=True)
    return 0


def _say_interrupted(out: Path | None) -> None:
    from fractrain_fx.training.run import can_resume

    print("interrupted", file=sys.stderr, end="")
    if out is not None and can_resume(out):
        print(f"; go on with: fractrain train --resume {out}", file=sys.stderr, end="")
    print(file=sys.stderr)


def _show(arguments: dict[str, Any], *, rewrite: bool) -> None:
    from dataclasses import replace

    from fractrain_fx.api import fractrainify, plan
    from fractrain_fx.summary import summarize
    from fractrain_fx.training.log import new_console

    if not rewrite and arguments["batch"] is not None and arguments["machine"] is None:
        raise ConfigError("--batch is the batch of a step on a machine: add --machine NAME, or leave it out")
    model, options = _built(arguments)
    if rewrite:
        rewritten = fractrainify(model, **options)
        summary = summarize(rewritten)
        if arguments["draw"] is not None:
            from fractrain_fx.drawing import draw

            level: Level = "ops" if arguments["ops"] else "blocks"
            files = draw(rewritten, arguments["draw"], level=level, shapes=bool(arguments["shapes"]))
            print(f"drawn: {', '.join(map(str, files))}", file=sys.stderr)
    else:
        where = {"machine": arguments["machine"], "batch": 128 if arguments["batch"] is None else arguments["batch"]}
        summary = plan(model, **options, **where)
    if arguments["json"]:
        print(json.dumps(summary.to_dict(), default=str))
    else:
        new_console().print(replace(summary, show_ops=bool(arguments["ops"]), show_shapes=bool(arguments["shapes"])))


def _built(arguments: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """The model that the flags name, with the keywords of ``plan`` and ``fractrainify``."""
    from fractrain_fx.training.flags import names_data, settings_of
    from fractrain_fx.training.run import build

    settings = settings_of(arguments)
    built = build(settings, own_sizes=not names_data(arguments))
    args, kwargs = built.examples()
    return built.model, {"config": settings.frac, "example_inputs": args, "example_kwargs": kwargs}


def _compare(arguments: dict[str, Any]) -> None:
    from fractrain_fx.api import fractrainify
    from fractrain_fx.numerics import compare
    from fractrain_fx.training.log import new_console

    model, options = _built(arguments)
    bound = {} if arguments["bound"] is None else {"bound": arguments["bound"]}
    result = compare(fractrainify(model, **options), options["example_kwargs"] or options["example_inputs"], **bound)
    if arguments["json"]:
        print(json.dumps(result.to_dict()))
    else:
        new_console().print(result)


def _machines(arguments: dict[str, Any]) -> None:
    from fractrain_fx.hardware.catalogue import machine_rows
    from fractrain_fx.summary.machines import machines_table, source_lines
    from fractrain_fx.training.log import new_console

    rows = machine_rows()
    if arguments["json"]:
        print(json.dumps(rows))
        return
    console = new_console()
    console.print(machines_table(rows, console.width))
    for line in source_lines(rows):
        console.print(line, highlight=False, markup=False)


def _zoo(arguments: dict[str, Any]) -> None:
    from fractrain_fx.zoo.command import list_zoo, show_recipe, show_table

    name = arguments["name"]
    if arguments["action"] == "list":
        list_zoo(as_json=bool(arguments["json"]))
        return
    if name is None:
        raise ConfigError(f"fractrain zoo {arguments['action']} needs a name: 'fractrain zoo list' has them all")
    if arguments["action"] == "show":
        show_recipe(name, as_json=bool(arguments["json"]))
        return
    runs, into = [Path(folder) for folder in arguments["runs"] or ()], arguments["into"]
    show_table(name, runs, as_json=bool(arguments["json"]), into=None if into is None else Path(into))


def _build(arguments: dict[str, Any]) -> None:
    from fractrain_fx.native.build import kernels, library

    kernels()
    print(library())


def _export(arguments: dict[str, Any]) -> None:
    from fractrain_fx.cli.export import export

    export(arguments)


def _report(arguments: dict[str, Any]) -> None:
    from fractrain_fx.report.command import write_report

    plots = None if arguments["plots"] is None else Path(arguments["plots"])
    write_report(arguments["runs"], Path(arguments["out"]), plots=plots, epochs=arguments["epochs"] or ())


def _sensitivity(arguments: dict[str, Any]) -> None:
    from fractrain_fx.cli.sensitivity import show_sensitivity

    show_sensitivity(arguments)
