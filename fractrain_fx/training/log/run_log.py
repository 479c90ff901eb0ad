"""Reports while a run trains: a progress bar, a line for each epoch, metrics.jsonl and TensorBoard."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fractrain_fx.durable import write_text, writing
from fractrain_fx.summary.text import columns_or
from fractrain_fx.training.log.records import METRICS

__all__ = ["RunLog", "new_console"]

# Wide enough for the final table; a terminal has its own width.
_FILE_WIDTH = 112


def new_console() -> Console:
    """A console on standard output: as wide as the terminal or ``COLUMNS``; in a file, wide enough for the tables."""
    return Console(width=None if sys.stdout.isatty() else columns_or(_FILE_WIDTH))


class RunLog:
    """The reports of one run. Without ``active`` (all processes except the first) it prints and writes nothing.

    Args:
        out: the run's folder; ``None`` writes nothing.
        steps: training steps of the whole run.
        done: steps that a resumed run has already done.
        epoch: epochs that it has already done; later lines of ``metrics.jsonl`` are dropped.
        active: whether this process reports.
        console: prints the reports.
    """

    def __init__(
        self,
        out: Path | None,
        steps: int,
        *,
        done: int = 0,
        epoch: int = 0,
        active: bool = True,
        console: Console | None = None,
    ) -> None:
        self._active = active
        self._metrics = out / METRICS if out is not None and active else None
        self._board: Any = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console or new_console(),
            disable=not active,
        )
        self._task = self._progress.add_task("starting", total=steps, completed=done)
        if self._metrics is not None:
            _keep_epochs(self._metrics, epoch)
            self._board = self._open_board(self._metrics.parent, epoch)

    def __enter__(self) -> RunLog:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        if self._board is not None:
            self._board.close()

    def step(self, count: int, text: str | None = None) -> None:
        """Advance the bar, and change the text before it if one is given."""
        self._progress.update(self._task, advance=count, description=text)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._active:
            self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def epoch(self, values: Mapping[str, Any]) -> None:
        """Write one epoch's values: all to metrics.jsonl, the numbers to TensorBoard."""
        if self._metrics is not None:
            with writing(self._metrics), self._metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps({name: _plain(value) for name, value in values.items()}) + "\n")
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float) and name != "epoch":
                    self._board.add_scalar(name, value, values["epoch"])
            self._board.flush()

    def _open_board(self, out: Path, epoch: int) -> Any:
        if importlib.util.find_spec("tensorboard") is None:
            self.say("TensorBoard is not installed, so no event files: pip install 'fractrain_fx[tensorboard]'")
            return None
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(out / "tensorboard"), purge_step=epoch + 1)


def _plain(value: Any) -> Any:
    """The value for JSON, which has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _keep_epochs(path: Path, epoch: int) -> None:
    """Drop lines that were written after the checkpoint from which a run continues."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)[:epoch]
        write_text(path, "".join(lines))
