"""``python -m benchmarks.coverage --suite SUITE --out FILE``: put the models of a suite through every check."""

from __future__ import annotations

import os

# Set before torch is imported: the sweep runs many processes with one thread each.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.coverage import hf_models, libraries, timm_models, torchvision_models
from benchmarks.coverage.corpus.page import read_rows
from benchmarks.coverage.pool import Limits, run
from benchmarks.coverage.results import Results
from benchmarks.coverage.spreadsheet import beside, write_csv
from benchmarks.coverage.table import markdown
from benchmarks.coverage.trial import passed

_SUITES = {"timm": timm_models, "hf": hf_models, "torchvision": torchvision_models, "libraries": libraries}


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    torch.set_num_threads(1)
    suite = _SUITES[options.suite]
    results = Results(options.out)
    for path in options.merge:
        results.take(path)
    known = {case.name: case for case in suite.cases(sample=False)}
    results.known[options.suite] = len(known)
    wanted = [known[name] for name in options.only] if options.only else suite.cases(options.sample)
    first, count = options.shard
    wanted = wanted[first - 1 :: count]
    left = [case for case in wanted if results.open(case.key, options.retry)]
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(options.suite, total=len(wanted), completed=len(wanted) - len(left))
        for case, row in run(left, suite.build, Limits(options.seconds, options.gib), options.jobs):
            results.add(case, row)
            if not passed(row):
                progress.console.print(f"{case.key}: {row.get('failed_at')}: {row.get('cause')}", markup=False)
            progress.advance(task)
    if options.table:
        corpus = read_rows(options.out.with_name("corpus.jsonl"))
        options.table.write_text(markdown(results, corpus), encoding="utf-8")
        write_csv(results, beside(options.out))
    results.write()
    good = sum(passed(results.rows[case.key]) for case in wanted)
    console.print(f"{options.suite}: {good} of {len(wanted)} pass every check; {options.out}", markup=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__)
    parser.add_argument("--suite", choices=tuple(_SUITES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON of all results; its models are not run again")
    parser.add_argument("--table", type=Path, help="Markdown page of all rows in --out; writes a CSV beside --out too")
    parser.add_argument("--sample", action="store_true", help="two of each timm or torchvision module, all HF types")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these models")
    parser.add_argument("--shard", type=_shard, default=(1, 1), metavar="K/N", help="the K-th of N parts of the models")
    parser.add_argument(
        "--merge", nargs="+", type=Path, default=[], metavar="FILE", help="add rows of these that --out lacks"
    )
    parser.add_argument("--retry", action="store_true", help="run models again that did not pass")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="processes at a time")
    parser.add_argument("--seconds", type=float, default=180.0, help="processor time for one model")
    parser.add_argument("--gib", type=float, default=8.0, help="memory for one model")
    return parser


def _shard(text: str) -> tuple[int, int]:
    first, _, count = text.partition("/")
    if not (first.isdigit() and count.isdigit() and 1 <= int(first) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with 1 <= K <= N")
    return int(first), int(count)


if __name__ == "__main__":
    main()
