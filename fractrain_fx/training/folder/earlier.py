"""Files of an earlier run in a folder, which a run that starts there would replace."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from fractrain_fx.durable import writing
from fractrain_fx.numerics.records import FILE
from fractrain_fx.training.folder.checkpoint import latest_checkpoint
from fractrain_fx.training.log.records import METRICS, RESULT

__all__ = ["holds_run", "set_aside"]


def holds_run(folder: Path) -> bool:
    """Whether a folder has a checkpoint, metrics or a result, so that no new run may start in it."""
    return latest_checkpoint(folder) is not None or any(_is_written(folder / name) for name in (METRICS, RESULT))


def set_aside(folder: Path) -> list[Path]:
    """Rename the files of an earlier run without a checkpoint to names such as ``metrics-before-1.jsonl``.

    Returns:
        The files under their new names.

    Raises:
        RunError: the folder cannot be written to.
    """
    files = [path for name in (METRICS, RESULT, FILE) if _is_written(path := folder / name)]
    number = next(number for number in count(1) if not any(_before(path, number).exists() for path in files))
    with writing(folder):
        return [path.rename(_before(path, number)) for path in files]


def _is_written(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _before(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-before-{number}{path.suffix}")
