"""``python -m benchmarks.step``: the cost of a training step, against the eager float32 step of the same model."""

from __future__ import annotations

from benchmarks.steady import all_cores, steady

if __name__ == "__main__":
    steady()

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.machine import describe
from benchmarks.page import write_section
from benchmarks.records import command, quartiles, ratios
from benchmarks.step.measure import interleaved, peak_bytes, processor_seconds, saved_bytes, seconds, waits
from benchmarks.step.methods import MODES, OWN, Method, Step, default_methods, parse, prepare
from benchmarks.step.peers import PEERS, NotAvailableError, refusal
from benchmarks.step.results import Row, Run, save
from benchmarks.step.subjects import SUBJECTS
from benchmarks.step.table import markdown, not_run, rich_table

# Steps before the first measured one: allocators, ranges and the peers' statistics settle.
_WARM_UP = 3

# The models of docs/measured/performance.md; the others are larger, or for trying code.
_USUAL = ("resnet38", "mobilenetv2", "resnet18", "vit_tiny", "transformer-base")


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(argv)
    methods = options.methods or default_methods(options.device)
    if methods[0] != Method("float"):
        methods = [Method("float"), *(method for method in methods if method != Method("float"))]
    if options.clock == "processor" and (options.device != "cpu" or torch.get_num_threads() != 1):
        raise SystemExit("--clock processor adds up all threads, also waiting ones: run it on a CPU, OMP_NUM_THREADS=1")
    console = Console(width=max(Console().width, 130))  # a log file must not cut numbers off
    runs: dict[str, Run] = {}
    for name in options.models:
        run = measure(name, methods, options, command("benchmarks.step", argv), console)
        console.print(rich_table(run))
        for line in not_run(run):
            console.print(f"not run: {line}", markup=False)
        runs[run.key] = run
        if options.json:
            runs = save(options.json, run)
    if options.table:
        write_section(options.table, "benchmarks.step", markdown(runs.values()))


def measure(
    name: str,
    methods: Sequence[Method],
    options: argparse.Namespace,
    how: str,
    console: Console,
    tolerated: type[Exception] = NotAvailableError,
    prepared: Callable[[], None] = lambda: None,
) -> Run:
    """All methods on one model; a method that raises a ``tolerated`` error gets a note instead of numbers.

    ``prepared`` is called after each method's first steps, before steps are timed.
    """
    torch.manual_seed(0)
    torch._dynamo.reset()  # each model has its own compiled functions, and their number is limited
    subject, device = SUBJECTS[name], options.device
    batch = options.batch or subject.batch[device]
    model = subject.build().to(device)
    x, y = (tensor.to(device) for tensor in subject.data(batch))
    steps: dict[str, Step] = {}
    first: dict[str, float] = {}
    notes: dict[str, str] = {}
    for method in methods:
        with console.status(f"{name}: preparing {method}"):
            try:
                step = prepare(method, model, x, y, subject.loss)
                with all_cores():  # the processes of torch's compiler start here
                    first[str(method)] = seconds(step.run, device)
                for _ in range(_WARM_UP):
                    step.run()
            except NotAvailableError as missing:
                notes[str(method)] = str(missing)
            except Exception as error:
                if not isinstance(error, tolerated) and not (method.base in PEERS and isinstance(error, RuntimeError)):
                    raise
                notes[str(method)] = refusal(error)
            else:
                steps[str(method)] = step
    prepared()
    for step in steps.values():  # it may have waited
        step.run()
    with console.status(f"{name}: {options.rounds} rounds of {len(steps)} methods"):
        clock = processor_seconds if options.clock == "processor" else seconds
        times = interleaved({key: step.run for key, step in steps.items()}, options.rounds, device, clock=clock)
    run = Run(name, subject.title, device, batch, options.rounds, how, describe(device))
    for method in methods:
        key = str(method)
        if key not in steps:
            run.rows.append(Row(key, note=notes[key]))
            continue
        row = _row(method, times, first)
        try:
            row = _with_memory(row, steps[key], device)
        except tolerated as error:  # the times are there
            row = replace(row, note=refusal(error))
        run.rows.append(row)
    return _relative_memory(run)


def _row(method: Method, times: dict[str, list[float]], first: dict[str, float]) -> Row:
    key, alike = str(method), str(method.alike)
    return Row(
        method=key,
        ms=quartiles([1000 * duration for duration in times[key]]),
        ratio=ratios(times, key, "float"),
        alike=ratios(times, key, alike).median if alike not in (key, "float") and alike in times else None,
        first=first[key],
    )


def _with_memory(row: Row, step: Step, device: str) -> Row:
    on_gpu = device == "cuda"
    return replace(
        row, saved=saved_bytes(step), peak=peak_bytes(step) if on_gpu else None, waits=waits(step) if on_gpu else None
    )


def _relative_memory(run: Run) -> Run:
    base = run.rows[0]
    return replace(
        run,
        rows=[
            replace(row, saved_ratio=_over(row.saved, base.saved), peak_ratio=_over(row.peak, base.peak))
            for row in run.rows
        ],
    )


def _over(mine: int | None, base: int | None) -> float | None:
    return mine / base if mine is not None and base else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=tuple(SUBJECTS),
        default=list(_USUAL),
        metavar="MODEL",
        help=f"of {', '.join(SUBJECTS)} (default: {', '.join(_USUAL)})",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        type=_method,
        metavar="METHOD",
        help=f"of {', '.join((*OWN, *PEERS))}, each with any of +{', +'.join(MODES)}; float is always "
        "among them (default: those of the device)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=10, help="steps measured of each method")
    parser.add_argument(
        "--clock",
        choices=("wall", "processor"),
        default="wall",
        help="processor: time that the process computed (CPU only, with OMP_NUM_THREADS=1), for machines that do other "
        "work too",
    )
    parser.add_argument("--batch", type=int, help="samples in a step, instead of each model's own")
    parser.add_argument("--json", type=Path, help="keep the results here; runs of other models already in it stay")
    parser.add_argument(
        "--table",
        type=Path,
        help="write all results in --json (or this run's) to this Markdown page, "
        "between <!-- benchmarks.step --> and <!-- /benchmarks.step -->",
    )
    return parser


def _method(text: str) -> Method:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    main()
