"""Train a grid of runs, and write docs/measured/results.md from their results.

``python -m benchmarks.science run --grid main --data-dir DIR`` trains unfinished runs, two at a time, and
continues where it was stopped. ``--task``, ``--method``, ``--setting``, ``--epochs`` and ``--seed`` give a grid by its
axes. ``list`` shows the progress of each run, ``collect`` adds finished runs to the results, ``page`` writes the page.
``fixed`` evaluates finished runs with one option a block for all samples, which ``run`` does at the end of a run.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.science.folder import LOCKED, finished, fix_choices, is_done, train
from benchmarks.science.grid import GRIDS, Run, runs_of
from benchmarks.science.page import write_page
from benchmarks.science.records import merge_records, read_records
from benchmarks.science.runner import Place, work_off
from fractrain_fx.training.log.records import METRICS


@dataclass(frozen=True)
class Home:
    """A set of trainings with a page of its own.

    Attributes:
        words: what the command does.
        program: its name.
        runs: folder of the runs' folders.
        results: a line for each finished run.
        page: the page that is made of them.
        write_page: makes it, from its path, that of the results and the results.
        grids: the grids that are meant where no grid and no task is given.
    """

    words: str | None
    program: str
    runs: Path
    results: Path
    page: Path
    write_page: Callable[[Path, Path, Sequence[dict[str, Any]]], None]
    grids: tuple[str, ...] = ()


SCIENCE = Home(
    words=__doc__,
    program="python -m benchmarks.science",
    runs=Path("runs/science"),
    results=Path("docs/results/science.jsonl"),
    page=Path("docs/measured/results.md"),
    write_page=write_page,
)


def main(argv: list[str] | None = None, home: Home = SCIENCE) -> int:
    options = _parser(home).parse_args(argv)
    options.home = home
    if options.command == "train":
        run = Run(options.task, options.method, options.setting, options.epochs, options.seed)
        return 0 if train(run, options.runs / run.name, options.data_dir) else LOCKED
    if options.command == "list":
        for run in _chosen(options):
            print(f"{_progress(run, options.runs):>12}  {run.name}")
        return 0
    if options.command == "run":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped: call again to go on"))  # which stops the runs too
        place = Place(options.runs, options.data_dir, options.jobs, options.nice)
        failed = work_off(_chosen(options), place, lambda run: _collect(options, run.name))
        for run in failed:
            print(f"failed: {run.name}, see {options.runs / run.name / 'output.txt'}", file=sys.stderr)
        return 1 if failed else 0
    if options.command == "fixed":
        for folder in sorted(options.runs.glob("*/")):
            fix_choices(folder)
    if options.command in ("collect", "fixed"):
        _collect(options, f"all finished runs of {options.runs}")
    else:
        home.write_page(options.page, options.results, read_records(options.results))
    return 0


def _collect(options: argparse.Namespace, what: str) -> None:
    """Add finished runs to the results, and print them."""
    merge_records(options.results, finished(options.runs))
    options.home.write_page(options.page, options.results, read_records(options.results))
    print(f"collected: {what}", flush=True)


def _chosen(options: argparse.Namespace) -> list[Run]:
    """The runs of the grids and axes that were given; a mistake in one of them shows before the first run starts."""
    grids = options.grid or (() if options.task else options.home.grids)
    runs = [run for grid in grids for run in GRIDS[grid]]
    if options.task:
        runs += runs_of(options.task, options.method, options.setting, options.epochs, options.seed)
    for run in runs:
        assert run.values
    return list(dict.fromkeys(runs))


def _progress(run: Run, runs: Path) -> str:
    folder = runs / run.name
    if is_done(folder):
        return "done"
    metrics = folder / METRICS
    epochs = len(metrics.read_text(encoding="utf-8").splitlines()) if metrics.is_file() else 0
    return f"{epochs} of {run.epochs}" if folder.is_dir() else "not begun"


def _parser(home: Home) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=home.program, description=home.words)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "list", "collect", "fixed", "page", "train"):
        command = commands.add_parser(name)
        command.add_argument("--runs", type=Path, default=home.runs, help="folder of the runs' folders")
        command.add_argument("--results", type=Path, default=home.results, help="a line for each finished run")
        command.add_argument("--page", type=Path, default=home.page)
        if name in ("run", "list"):
            command.add_argument("--grid", nargs="+", choices=GRIDS, default=[], help=" ".join(home.grids) or None)
            command.add_argument("--task", nargs="+", default=[])
            command.add_argument("--method", nargs="+", default=["fractrain"])
            command.add_argument("--setting", nargs="+", default=["default"], help="names, joined by + for several")
            command.add_argument("--epochs", nargs="+", type=int, default=[20])
            command.add_argument("--seed", nargs="+", type=int, default=[0])
        if name in ("run", "train"):
            command.add_argument("--data-dir", help="folder of the data sets' files")
        if name == "run":
            command.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
            command.add_argument("--nice", type=int, default=19)
        if name == "train":
            for axis, kind in (("task", str), ("method", str), ("setting", str), ("epochs", int), ("seed", int)):
                command.add_argument(f"--{axis}", type=kind, required=True)
    return parser


if __name__ == "__main__":
    sys.exit(main())
