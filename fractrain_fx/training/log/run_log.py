"""Reports while a run trains: a progress bar or lines, a line for each epoch, metrics.jsonl and TensorBoard."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fractrain_fx.durable import write_text, writing
from fractrain_fx.numerics import Watch, WatchedStep
from fractrain_fx.summary.text import columns_or
from fractrain_fx.training.length import RunLength
from fractrain_fx.training.log.messages import StepReport, bar_text, step_line
from fractrain_fx.training.log.records import METRICS, kept_lines

__all__ = ["Pace", "RunLog", "new_console"]

# Wide enough for the final table; a terminal has its own width.
_FILE_WIDTH = 112
_SECONDS_BETWEEN_LINES = 30.0
_SHARES = ("cp", "cp_total", "fw", "eb", "gc")


def new_console() -> Console:
    """A console on standard output: as wide as the terminal or ``COLUMNS``; in a file, wide enough for the tables."""
    return Console(width=None if sys.stdout.isatty() else columns_or(_FILE_WIDTH))


class RunLog:
    """The reports of one run. Without ``active`` (all processes except the first) it prints and writes nothing.

    On a terminal a bar shows the progress. Anywhere else a line is printed every 30 seconds.

    Args:
        out: the run's folder; ``None`` writes nothing.
        length: of the whole run.
        epoch: epochs that a resumed run has already done; later lines of ``metrics.jsonl`` are dropped.
        active: whether this process reports.
        console: prints the reports.
    """

    def __init__(
        self,
        out: Path | None,
        length: RunLength,
        *,
        epoch: int = 0,
        active: bool = True,
        console: Console | None = None,
    ) -> None:
        batches, self._done = map(length.batches_before, (length.epochs, epoch))
        self._out, self._active = out, active
        self._metrics = out / METRICS if out is not None and active else None
        self._board: Board | None = None
        self._console = console or new_console()
        self._lines = active and not self._console.is_terminal
        self._pace = Pace(batches - self._done)
        self._printed = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not active or self._lines,
        )
        self._task = self._progress.add_task("starting", total=batches, completed=self._done)
        if self._metrics is not None:
            lines = kept_lines(self._metrics, epoch)
            if len(lines) < epoch:
                self.say(f"{self._metrics.name} has no lines of the first {epoch - len(lines)} epochs, which were lost")
            if self._metrics.exists():
                write_text(self._metrics, "".join(lines))
            if importlib.util.find_spec("tensorboard") is not None:
                self._board = Board(self._metrics.parent, epoch=epoch, step=length.steps_before(epoch))
            else:
                self.say("TensorBoard is not installed, so no event files: pip install 'fractrain_fx[tensorboard]'")

    def __enter__(self) -> RunLog:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self._board is not None:
            self._board.close()

    @property
    def due(self) -> bool:
        """Whether it is time for the next line of a run without a terminal."""
        return self._lines and time.monotonic() - self._printed >= _SECONDS_BETWEEN_LINES

    def begin_epoch(self) -> None:
        """Start the clock of training: what ran since the last step (an evaluation) is not training."""
        self._pace.begin()

    def step(self, samples: int) -> None:
        """Note that a batch was trained, with its number of samples in all processes."""
        self._pace.step(samples)
        self._progress.update(self._task, advance=1)

    def report(self, report: StepReport) -> None:
        """Report a step: to TensorBoard, on the bar, or as a line if one is due."""
        if not self._active:
            return
        speed = self._pace.speed()
        if self._board is not None:
            self._board.step(report, speed)
        self._progress.update(self._task, description=bar_text(report))
        if self.due:
            self.say(step_line(report, speed, self._pace.left()))
            self._printed = time.monotonic()

    def watching(self, module: Any, every: int | None) -> AbstractContextManager[object]:
        """A context in which the training of ``module`` is watched every so many batches, if that is given."""
        if every is None:
            return nullcontext()
        return Watch(module, every=every, out=self._out, done=self._done, told=self._numerics)

    def _numerics(self, seen: WatchedStep) -> None:
        """Write a watched step to TensorBoard; its line of JSON is written by who watches."""
        if self._board is not None:
            self._board.numerics(seen)

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line (above the bar, on a terminal)."""
        if self._active:
            self._console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    def epoch(self, values: Mapping[str, Any], bits: Mapping[str, float]) -> None:
        """Write one epoch's values: all to metrics.jsonl; the numbers and the bits of each block to TensorBoard."""
        if self._metrics is not None:
            with writing(self._metrics), self._metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps({name: _plain(value) for name, value in values.items()}) + "\n")
        if self._board is not None:
            self._board.epoch(values, bits)


class Board:
    """Writes ``tensorboard/`` (by epochs) and ``tensorboard/steps/`` in a run's folder.

    They are two runs of TensorBoard, because a resumed run drops what was written after its checkpoint, and epochs and
    steps count differently.

    Args:
        out: the run's folder.
        epoch: epochs that a resumed run has already done.
        step: optimizer steps that it has already done.
    """

    def __init__(self, out: Path, *, epoch: int, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._epochs = SummaryWriter(str(out / "tensorboard"), purge_step=epoch + 1)
        self._steps = SummaryWriter(str(out / "tensorboard" / "steps"), purge_step=step + 1)

    def epoch(self, values: Mapping[str, Any], bits: Mapping[str, float]) -> None:
        """Write the numbers of an epoch: a line of ``metrics.jsonl``, and the mean forward bits of each block."""
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float) and name != "epoch"}
        _add(self._epochs, numbers | {"stage": values["stage"] + 1}, bits, values["epoch"])
        self._epochs.flush()
        self._steps.flush()

    def step(self, report: StepReport, speed: float) -> None:
        """Write the numbers of a step; ``speed`` is in samples a second."""
        numbers = {name: getattr(report, name) for name in ("loss", "cp", "cp_total", "stage")}
        _add(self._steps, numbers | {"lr": report.rate, "samples_per_second": speed}, report.bits, report.place.total)

    def numerics(self, seen: WatchedStep) -> None:
        """Write a watched step: histograms over the ops of each operand's bits that survive, and of block scales."""
        for letter in "xwg":
            of_letter = [record.statistics for record in seen.operands if record.operand == letter and not record.as_if]
            bits = [statistics.effective_bits for statistics in of_letter if statistics.effective_bits is not None]
            if bits:
                self._steps.add_histogram(f"effective_bits/{letter}", torch.tensor(bits), seen.step)
        for record in seen.operands:
            name = f"{record.op}/{record.operand}.{record.products[0]}" + (
                f".as_{record.as_if}" if record.as_if else ""
            )
            if record.statistics.sqnr is not None:
                self._steps.add_scalar(f"sqnr/{name}", record.statistics.sqnr, seen.step)
            if record.statistics.scales:
                exponents = torch.tensor(list(record.statistics.scales))
                counts = torch.tensor(list(record.statistics.scales.values()))
                self._steps.add_histogram(f"scales/{name}", exponents.repeat_interleave(counts), seen.step)

    def close(self) -> None:
        """Write what is left."""
        self._epochs.close()
        self._steps.close()


class Pace:
    """Counts batches and samples, and the time that training takes without evaluations.

    Args:
        batches: batches that are still to be trained.
    """

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self._started = self._last = time.monotonic()
        self._done = self._samples = 0
        self._seconds = 0.0

    def begin(self) -> None:
        """Leave out the time since the last step."""
        self._last = time.monotonic()

    def step(self, samples: int) -> None:
        """Note a batch of so many samples."""
        now = time.monotonic()
        self._seconds += now - self._last
        self._last = now
        self._samples += samples
        self._done += 1

    def speed(self) -> float:
        """Samples a second since this was last asked."""
        speed = self._samples / self._seconds if self._seconds else 0.0
        self._samples, self._seconds = 0, 0.0
        return speed

    def left(self) -> float:
        """Seconds to the end of the run, if what is left goes as fast as what was done, evaluations included."""
        return (time.monotonic() - self._started) / max(self._done, 1) * (self._batches - self._done)


def _plain(value: Any) -> Any:
    """The value for JSON, which has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _add(writer: Any, numbers: Mapping[str, float], bits: Mapping[str, float], place: int) -> None:
    """Write numbers at a step; people read them, so shares of cost are in per cent and named so."""
    for name, value in numbers.items():
        if name in _SHARES:
            writer.add_scalar(f"{name}_percent", 100 * value, place)
        else:
            writer.add_scalar(name, value, place)
    for block, mean in bits.items():
        writer.add_scalar(f"bits/{block}", mean, place)
