"""The folder of one run: its settings, whether it is finished, and its result as one record."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from benchmarks.machine import describe, versions
from benchmarks.science.fixed import fixed_choice
from benchmarks.science.grid import Run
from fractrain_fx.durable import write_text
from fractrain_fx.training import RunResult, RunSettings, Trainer, new_run, resume_run
from fractrain_fx.training.folder.checkpoint import latest_checkpoint
from fractrain_fx.training.log.records import METRICS, EpochRecord

__all__ = ["LOCKED", "finished", "fix_choices", "is_done", "record_of", "train"]

_ASKED, _RESULT, _FIXED = "run.json", "result.json", "fixed.json"

# Exit code of a process that finds its run taken by another process.
LOCKED = 75


def is_done(folder: Path) -> bool:
    """Whether the run is finished."""
    return (folder / _RESULT).is_file()


def train(run: Run, folder: Path, data_dir: str | None) -> bool:
    """Train a run to its end, from its checkpoint if there is one; ``False`` if another process is training it."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "lock", timeout=0):
            if is_done(folder):
                return True
            asked = {"run": asdict(run), "values": run.values, "made_with": _made_with()}
            write_text(folder / _ASKED, json.dumps(asked))
            if latest_checkpoint(folder) is None and latest_checkpoint(folder / "pretrain") is None:
                trainer = new_run(RunSettings.from_dict(run.values | {"data_dir": data_dir}), folder)
            else:
                trainer = resume_run(folder)
            trainer.fit()
            _keep_fixed(folder, trainer)
    except Timeout:
        return False
    return True


def fix_choices(folder: Path) -> None:
    """Evaluate a finished run with one option a block, where that was not done yet."""
    if is_done(folder) and not (folder / _FIXED).is_file():
        _keep_fixed(folder, resume_run(folder))


def _keep_fixed(folder: Path, trainer: Trainer) -> None:
    choice = fixed_choice(trainer)
    write_text(folder / _FIXED, json.dumps(None if choice is None else asdict(choice)))


def finished(runs: Path) -> list[dict[str, Any]]:
    """The records of all finished runs in a folder of runs."""
    return [record_of(asked.parent) for asked in sorted(runs.glob(f"*/{_ASKED}")) if is_done(asked.parent)]


def record_of(folder: Path) -> dict[str, Any]:
    """The record of a finished run: its axes, settings, result, and a point for each epoch."""
    asked = json.loads((folder / _ASKED).read_text(encoding="utf-8"))
    result = RunResult.from_json(folder / _RESULT)
    lines = (folder / METRICS).read_text(encoding="utf-8").splitlines()
    epochs = [EpochRecord.from_dict(json.loads(line)) for line in lines]
    return {
        **asked["run"],
        "metric": result.metric,
        "value": result.value,
        "best": result.best,
        "total_macs": result.total_macs,
        "seconds": round(result.seconds),
        "fixed": json.loads((folder / _FIXED).read_text(encoding="utf-8")) if (folder / _FIXED).is_file() else None,
        "points": [_point(epoch) for epoch in epochs],
        "values": asked["values"],
        "made_with": asked["made_with"],
    }


def _point(epoch: EpochRecord) -> dict[str, Any]:
    row = epoch.row
    return {
        "epoch": row.epoch,
        "value": epoch.value,
        "loss": row.loss,
        "total_macs": epoch.total_macs,
        "level": row.level,
        "levels": [[part.step, part.level] for part in row.pure],
        "cp": row.cp,
        "mutual_information": epoch.mutual_information,
        "configurations": epoch.configurations,
        "commonest": epoch.commonest,
    }


def _made_with() -> dict[str, str]:
    return describe("cpu") | versions("torch", "timm", "fractrain_fx")
