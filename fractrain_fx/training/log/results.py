"""The progress and the result of a run, and the table that compares runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text

from fractrain_fx.durable import write_text
from fractrain_fx.engine.ledger import Ledger
from fractrain_fx.engine.rows import beside_shares
from fractrain_fx.errors import RunError
from fractrain_fx.hardware.run_cost import StepPrices, run_cost
from fractrain_fx.hardware.run_machines import MachineRun, price_run
from fractrain_fx.summary.text import fits

__all__ = ["Best", "Progress", "ResultsTable", "RunResult", "results_table"]

_EDGES = 4  # characters around a table
_CAPTION = (
    "cp: gated or scheduled contractions, cp_total: all of them, in per cent of\n"
    "full-precision training; MACs: the whole training, counted at 32 bits;\n"
    "energy and latency: of all that on BitFusion (docs/background/bitfusion.md)"
)


@dataclass(frozen=True)
class Best:
    """The best evaluation of a run, or none yet.

    Attributes:
        value: the test measure.
        epoch: the epoch before the evaluation, counted from 1.
        macs: training cost until then in full-precision MACs.
    """

    value: float = math.nan
    epoch: int = 0
    macs: float = 0.0


@dataclass
class Progress:
    """The trainer's own state besides model, optimizer and engine.

    Attributes:
        epoch: epochs trained.
        seconds: wall time of training, evaluation included.
        value: the test measure of the last evaluation.
        best: the best evaluation.
    """

    epoch: int = 0
    seconds: float = 0.0
    value: float = math.nan
    best: Best | None = None

    def state_dict(self) -> dict[str, Any]:
        """Plain values (JSON, which has no NaN) of all but the epoch."""
        return {
            "seconds": self.seconds,
            "best": None if self.best is None else dict(vars(self.best)),
            "value": self.value if math.isfinite(self.value) else None,
        }

    @classmethod
    def from_state_dict(cls, epoch: int, state: Mapping[str, Any]) -> Progress:
        """The progress after ``epoch`` epochs, from its ``state_dict``."""
        value = math.nan if state["value"] is None else state["value"]
        best = None if state["best"] is None else Best(**state["best"])
        return cls(epoch, state["seconds"], value, best)


@dataclass(frozen=True)
class RunResult:
    """The outcome of a run. Costs are shares 0..1 of full-precision training, means over all samples seen.

    Attributes:
        label: name of this run in tables.
        metric: name of the test measure.
        value: the measure after the last epoch; ``best`` is the best of all epochs, reached after ``best_epoch``
            (0 if no measure was finite).
        mean_cp: cost of the gated or scheduled contractions.
        mean_cp_total: cost of all contractions.
        total_macs: training cost in full-precision MACs.
        best_macs: training cost until the best epoch.
        seconds: wall time of training, with evaluation.
        turning_points: epochs in or after which another stage began.
        epochs: epochs trained.
        hardware: cost until the ``end`` and the ``best`` evaluation in bit operations and on BitFusion, by path, stage,
            block and op (:class:`fractrain_fx.hardware.run_cost.RunCost`).
        uncounted: number of contractions that no formula counts. No cost includes them.
        turning_steps: the optimizer steps before those stages.
        machines: what the run would take on named machines.
    """

    label: str
    metric: str
    value: float
    best: float
    best_epoch: int
    mean_cp: float
    mean_cp_total: float
    total_macs: float
    best_macs: float
    seconds: float
    turning_points: tuple[int, ...]
    epochs: int
    hardware: dict[str, Any]
    uncounted: int
    turning_steps: tuple[int, ...]
    machines: tuple[MachineRun, ...]

    @classmethod
    def of(cls, label: str, metric: str, ledger: Ledger, progress: Progress, prices: StepPrices) -> RunResult:
        """The result of a run so far.

        Args:
            label: name of the run in tables.
            metric: name of the test measure.
            ledger: the engine's ledger.
            progress: the progress of the run.
            prices: the prices of its steps.
        """
        best = progress.best or Best()
        costs = {"end": run_cost(prices, ledger.rows), "best": run_cost(prices, ledger.rows[: best.epoch])}
        return cls(
            label=label,
            metric=metric,
            value=progress.value,
            best=best.value,
            best_epoch=best.epoch,
            mean_cp=ledger.mean_cp,
            mean_cp_total=ledger.mean_cp_total,
            total_macs=ledger.total_macs,
            best_macs=best.macs,
            seconds=progress.seconds,
            turning_points=ledger.turning_points,
            epochs=progress.epoch,
            hardware={until: cost.to_dict() for until, cost in costs.items()},
            uncounted=ledger.uncounted,
            turning_steps=ledger.turning_steps,
            machines=price_run(prices.model, ledger.rows, prices.batch),
        )

    @property
    def energy(self) -> float | None:
        """Joules of the whole training on BitFusion; ``None`` if it has no price for any op."""
        return float(self.hardware["end"]["total"]["joules"]) or None

    @property
    def latency(self) -> float | None:
        """Seconds of the whole training on BitFusion; ``None`` if it has no price for any op."""
        return float(self.hardware["end"]["total"]["seconds"]) or None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, path: Path) -> RunResult:
        """Read a file that ``to_json`` wrote.

        Raises:
            RunError: the file does not exist, or holds something else.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            turns = {name: tuple(values[name]) for name in ("turning_points", "turning_steps")}
            machines = tuple(map(MachineRun.from_dict, values["machines"]))
            return cls(**values | turns | {"machines": machines})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{path} holds no result of a run ({error}): fractrain train --resume {path.parent} writes it again"
            ) from error

    def to_json(self, path: Path) -> None:
        """Write as JSON.

        Raises:
            RunError: the disk is full, or the folder cannot be written to.
        """
        write_text(path, json.dumps(self.to_dict(), indent=2))


@dataclass(frozen=True)
class ResultsTable(JupyterMixin):
    """Runs side by side, all of one task: a row for each, or a column for each on a console too narrow for rows.

    Attributes:
        results: the runs.
        title: the title; none if empty.
    """

    results: tuple[RunResult, ...]
    title: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = self._rows()
        if fits(wide, console, options.max_width):
            yield wide
            return
        if self.title:
            yield Text(self.title, style="table.title")
        heads = [" ".join(head.split()) for head in _headings(self.results[0].metric)]
        room = options.max_width - max(map(len, heads)) - _EDGES
        shown: list[RunResult] = []
        for result in self.results:
            if shown and sum(map(_width, (*shown, result))) > room:
                yield _columns(heads, shown)
                shown = []
            shown.append(result)
        yield _columns(heads, shown)
        yield Text(" ".join(_CAPTION.split()), style="table.caption")

    def _rows(self) -> Table:
        table = Table(title=self.title or None, box=SIMPLE_HEAD, caption=_CAPTION)
        headings = _headings(self.results[0].metric)
        for heading in headings:
            right = heading != headings[0]
            table.add_column(heading, justify="right" if right else "left", no_wrap=heading != headings[-1])
        for result in self.results:
            table.add_row(*_cells(result))
        return table


def results_table(results: Sequence[RunResult], title: str = "") -> ResultsTable:
    """What rich prints as a table of runs."""
    return ResultsTable(tuple(results), title)


def _columns(heads: Sequence[str], results: Sequence[RunResult]) -> Table:
    """A row for each quantity, and a column for each run."""
    table = Table(box=SIMPLE_HEAD)
    (first, *others), *rows = zip(heads, *map(_cells, results), strict=True)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _width(result: RunResult) -> int:
    """The characters of a run's column, with the space beside it."""
    return max(map(len, _cells(result))) + 2


def _headings(metric: str) -> tuple[str, ...]:
    unit = " %" if metric == "accuracy" else ""
    return (
        *("\nrun", f"test\n{metric}{unit}", "\nbest", "mean\ncp %", "\ncp_total %", "training\nMACs"),
        *("energy\nJ", "latency\ns", "time\ns", "turning\npoints"),
    )


def _cells(result: RunResult) -> tuple[str, ...]:
    return (
        result.label,
        f"{result.value:.2f}",
        f"{result.best:.2f}",
        f"{100 * result.mean_cp:.2f}",
        f"{100 * result.mean_cp_total:.2f}{beside_shares(result.uncounted)}",
        f"{result.total_macs:.3e}",
        "-" if result.energy is None else f"{result.energy:.3g}",
        "-" if result.latency is None else f"{result.latency:.3g}",
        f"{result.seconds:.0f}",
        ", ".join(map(str, result.turning_points)) or "-",
    )
