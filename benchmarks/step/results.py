"""A run's rows, kept in a JSON file: one run for each model and device."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.records import Quartiles, load_rows, read_json, write_json

__all__ = ["Row", "Run", "load", "save"]


@dataclass(frozen=True)
class Row:
    """The measurement of one method.

    Attributes:
        method: name of the method.
        ms: milliseconds of a step.
        ratio: ratio to the eager float32 step of the same round.
        alike: median ratio to float in the same modes (compiled, autocast), if that was measured too.
        saved: bytes that autograd keeps between forward and backward.
        saved_ratio: ``saved`` as a ratio to float.
        peak, peak_ratio: the most bytes that a step allocates on a GPU.
        waits: number of waits for a GPU in a step, by kind; ``None`` without a GPU.
        first: seconds of the first step, with compilation.
        note: the reason that there are no numbers.
    """

    method: str
    ms: Quartiles | None = None
    ratio: Quartiles | None = None
    alike: float | None = None
    saved: int | None = None
    saved_ratio: float | None = None
    peak: int | None = None
    peak_ratio: float | None = None
    waits: dict[str, int] | None = None
    first: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Run:
    """The rows of one model on one device, measured together."""

    model: str
    title: str
    device: str
    batch: int
    rounds: int
    command: str
    machine: dict[str, str]
    rows: list[Row] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"{self.model}/{self.device}"


def save(path: Path, run: Run) -> dict[str, Run]:
    """Add a run to the file; replaces a run of the same model and device. Returns all runs of the file."""
    runs = load(path) | {run.key: run}
    write_json(path, runs)
    return runs


def load(path: Path) -> dict[str, Run]:
    """The runs of a file; empty if it does not exist."""
    return {key: Run(**(run | {"rows": load_rows(Row, run["rows"])})) for key, run in read_json(path).items()}
