"""``python -m benchmarks.skipping``: a training step in which a share of the samples skips every block it can.

Masked (``skipping="computed"``) computes these samples too; dispatched (``skipping="left-out"``) leaves them out from a
threshold on; gathered leaves them out at every share, which shows from where this saves time.
"""

from __future__ import annotations

from benchmarks.steady import steady

if __name__ == "__main__":
    steady()

import argparse
import contextlib
import copy
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.machine import describe
from benchmarks.page import markdown_table, write_section
from benchmarks.records import (
    Quartiles,
    command,
    load_rows,
    machine_words,
    quartiles,
    ratios,
    read_json,
    rich_table,
    spread,
    write_json,
)
from benchmarks.step.measure import interleaved, processor_seconds, saved_bytes, seconds
from benchmarks.step.methods import Step
from benchmarks.step.methods import parse as parse_method
from benchmarks.step.methods import prepare as prepare_step
from benchmarks.step.subjects import SUBJECTS
from fractrain_fx import Engine, FracConfig, FracModel, RunConfig, fractrainify
from fractrain_fx.config import Backend
from fractrain_fx.nn.gates import Controller

FORMS = ("masked", "dispatched", "gathered")
_WARM_UP = 2
HOW = """
A step is forward, `engine.loss` and backward in training mode. Every block with a skip path is skipped by the stated
share of the batch; the other samples choose the other options equally often. All forms at a share ran in one process,
in rounds of one step each in random order; ratios are of one round: median (quartiles). Saved memory is what autograd
keeps from forward to backward, beside float's. `dispatched` is `skipping="left-out"`; `gathered` is the same from the
first sample on, `skipping=0`; `masked` is `skipping="computed"`.
"""


@dataclass(frozen=True)
class Row:
    """The measurement of one form at one share of skipped samples."""

    share: float
    form: str
    ms: Quartiles
    to_masked: Quartiles
    to_float: Quartiles
    saved_ratio: float


@dataclass(frozen=True)
class Run:
    """All rows of one model."""

    model: str
    title: str
    method: str
    batch: int
    rounds: int
    command: str
    machine: dict[str, str]
    rows: list[Row] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(argv)
    if options.clock == "processor" and (options.device != "cpu" or torch.get_num_threads() != 1):
        raise SystemExit("--clock processor adds up all threads, also waiting ones: set OMP_NUM_THREADS=1")
    console = Console(width=max(Console().width, 120))
    runs = _load(options.json)
    for name in options.models:
        with console.status(name):
            run = measure(name, options, command("benchmarks.skipping", argv))
        title = f"{run.title}, batch {run.batch}, method {run.method}, {run.rounds} rounds"
        console.print(rich_table(title, _HEAD, map(_cells, run.rows), text_columns=2))
        if (older := runs.get(name)) and (older.method, older.batch) == (run.method, run.batch):
            kept = [row for row in older.rows if row.share not in options.shares]
            run = replace(run, rows=sorted([*kept, *run.rows], key=lambda row: row.share))
        runs[name] = run
        if options.json:
            write_json(options.json, runs)
    if options.table:
        write_section(options.table, "benchmarks.skipping", markdown(runs.values()))


def measure(name: str, options: argparse.Namespace, how: str) -> Run:
    """All forms at all shares on one model."""
    torch.manual_seed(0)
    subject = SUBJECTS[name]
    device = options.device
    batch = options.batch or subject.batch[device]
    model = subject.build().to(device)
    x, y = (tensor.to(device) for tensor in subject.data(batch))
    run = Run(name, subject.title, options.method, batch, options.rounds, how, describe(device))
    clock = processor_seconds if options.clock == "processor" else seconds
    config = FracConfig.paper(options.method, run=RunConfig(backend=options.backend))
    plain = prepare_step(parse_method("float"), model, x, y, subject.loss)
    for share in options.shares:
        steps = {"float": plain}
        for form in FORMS:
            steps[form] = prepare(form, config, model, x, y, subject.loss, share)
        for step in steps.values():
            for _ in range(_WARM_UP):
                step.run()
        times = interleaved({key: step.run for key, step in steps.items()}, options.rounds, device, clock=clock)
        run.rows.extend(_rows(share, steps, times))
    return run


def prepare(
    form: str,
    config: FracConfig,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    share: float,
) -> Step:
    """A step of a copy of a model in which a share of the samples skips."""
    if form != "masked":
        config = config.replace(**{"run.skipping": 0.0 if form == "gathered" else "left-out"})
    trained = fractrainify(copy.deepcopy(model), config=config, example_inputs=(x[:2],), check=False).train()
    skip_share(trained, len(x), share)
    engine = Engine(trained)
    return Step(lambda: engine.loss(loss(trained(x), y)), tuple(trained.parameters()), contextlib.nullcontext)


def skip_share(model: FracModel, batch: int, share: float) -> None:
    """Make a share of the samples skip every skippable block, and the others choose the other options in turn."""
    for module in list(model.modules()):
        if isinstance(module, Controller):
            module.head = _Choosing(module.head, batch, share).to(module.head.weight.device)  # type: ignore[assignment]


class _Choosing(nn.Module):
    """The controller's head, with one option of each sample far above the others (another where it may not skip)."""

    above: Tensor

    def __init__(self, head: nn.Linear, batch: int, share: float) -> None:
        super().__init__()
        self.head = head
        sample, options = torch.arange(batch), head.out_features
        # Spread over the batch, as in training, instead of its first samples.
        skips = (sample * round(share * batch)) % batch < round(share * batch)
        computing = F.one_hot(1 + (~skips).cumsum(0) % (options - 1), options)
        skipping = F.one_hot(torch.zeros_like(sample), options) * skips[:, None]
        self.register_buffer("above", 50.0 * computing + 100.0 * skipping, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
        return logits + self.above


def _rows(share: float, steps: dict[str, Step], times: dict[str, list[float]]) -> list[Row]:
    base = saved_bytes(steps["float"])
    return [
        Row(
            share,
            form,
            quartiles([1000 * duration for duration in times[form]]),
            ratios(times, form, "masked"),
            ratios(times, form, "float"),
            saved_bytes(steps[form]) / base,
        )
        for form in FORMS
    ]


def markdown(runs: Iterable[Run]) -> str:
    """All runs, with the commands that made them."""
    parts = [HOW.strip()]
    for run in runs:
        head = f"**{run.title}, batch {run.batch}, method {run.method}**"
        parts.append(f"{head}: `{run.command}`, {run.rounds} rounds; {machine_words(run.machine)}.")
        parts.append(markdown_table(_HEAD, map(_cells, run.rows), text_columns=2))
    return "\n\n".join(parts)


_HEAD = ("skipped", "form", "step, ms", "to masked", "to float", "saved memory to float's")


def _cells(row: Row) -> tuple[str, ...]:
    spreads = [spread(row.ms, 1), spread(row.to_masked, 2), spread(row.to_float, 2)]
    return (f"{row.share:.0%}", row.form, *spreads, f"{row.saved_ratio:.2f}")


def _load(path: Path | None) -> dict[str, Run]:
    held = {} if path is None else read_json(path)
    return {name: Run(**(run | {"rows": load_rows(Row, run["rows"])})) for name, run in held.items()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.skipping", description=__doc__)
    parser.add_argument(
        "--models", nargs="+", choices=tuple(SUBJECTS), default=["resnet38", "transformer-base"], metavar="MODEL"
    )
    parser.add_argument("--method", choices=("dfq", "fractrain", "slu"), default="dfq")
    parser.add_argument("--backend", choices=get_args(Backend), default="plain", help="of all forms")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.0, 0.25, 0.5, 0.75], help="skipped, 0..1")
    parser.add_argument("--rounds", type=int, default=7, help="steps measured of each form at each share")
    parser.add_argument(
        "--clock",
        choices=("wall", "processor"),
        default="wall",
        help="processor: time that the process computed (with OMP_NUM_THREADS=1), for machines that do other work too",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, help="samples in a step, instead of each model's own")
    parser.add_argument("--json", type=Path, help="keep the results here; other models and shares in it stay")
    parser.add_argument("--table", type=Path, help="write all results between the markers of this Markdown page")
    return parser


if __name__ == "__main__":
    main()
