"""The folder of a run: a new one, or one that is named, for a single process to write to; files of an earlier run."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import sys
import weakref
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from fractrain_fx.durable import require_folder, write_text, writing
from fractrain_fx.engine.distributed import on_first
from fractrain_fx.errors import RunError, require_packages
from fractrain_fx.numerics.records import FILE
from fractrain_fx.training.folder.checkpoint import latest_checkpoint
from fractrain_fx.training.log.records import METRICS, RESULT

if TYPE_CHECKING:
    from filelock import BaseFileLock

__all__ = ["HeldFolder", "hold", "hold_new", "hold_together", "holds_run", "set_aside"]

_LOCK, _HOLDER = ".lock", ".holder.json"

# Seconds in which a process that is about to let a folder go may do so.
_PATIENCE = 1.0


class HeldFolder:
    """A folder that only this process writes to, until :meth:`release` or until the process ends, however it ends.

    The process itself may hold a folder several times; other processes wait for the last release. Of processes that
    train together the first holds the folder for all.

    Attributes:
        path: the folder.
        released: whether other processes may write to it again.
    """

    def __init__(self, path: Path, lock: BaseFileLock | None = None, made: Sequence[Path] = ()) -> None:
        self.path = path
        self.released = False
        self._made = made
        self._release = None if lock is None else weakref.finalize(self, _release, path.absolute(), lock)

    def __enter__(self) -> HeldFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let other processes write to the folder."""
        self.released = True
        if self._release is not None:
            self._release()

    def discard(self) -> None:
        """Release the folder, and remove it if it was made for this and nothing was written to it."""
        self.release()
        if self._release is not None:
            with contextlib.suppress(OSError):  # it is not empty
                for folder in self._made:
                    folder.rmdir()


def _release(path: Path, lock: BaseFileLock) -> None:
    """Release a lock once; the last release removes what it wrote.

    A process that opened the removed file before then sees that it has no name any more, and opens a new one.
    """
    if lock.lock_counter == 1:
        for name in (_HOLDER, _LOCK):
            with contextlib.suppress(OSError):
                (path / name).unlink(missing_ok=True)
    lock.release()


def hold(path: Path, *, made: Sequence[Path] = ()) -> HeldFolder:
    """Make ``path`` a folder that only this process writes to.

    Args:
        path: the folder; it is made if it is missing.
        made: folders that were made for this already, innermost first.

    Raises:
        RunError: another process holds it (the message says which), or it cannot be written to.
    """
    missing = _make(path)
    lock = _lock(path)
    if lock is None:
        raise RunError(
            f"{path} is written to by another run: {_holder(path)}. Wait for it or stop it, or write to another folder"
        )
    held = HeldFolder(path, lock, [*missing, *made])
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    about = {"pid": os.getpid(), "host": platform.node(), "since": now, "command": command}
    write_text(path / _HOLDER, json.dumps(about) + "\n")
    return held


def hold_new(parent: Path, name: str) -> HeldFolder:
    """Make a folder ``name-1``, ``name-2``, ... in ``parent`` that nobody else has, and hold it.

    Raises:
        RunError: ``parent`` cannot be written to.
    """
    folders = _make(parent)
    for path in (parent / f"{name}-{number}" for number in count(1)):
        with writing(path), contextlib.suppress(FileExistsError):
            path.mkdir()
            return hold(path, made=[path, *folders])
    raise AssertionError("count() does not end")


def hold_together(take: Callable[[], HeldFolder]) -> HeldFolder:
    """What :func:`hold` or :func:`hold_new` gives the first of the processes that train together; a collective.

    Raises:
        MissingPackageError: a package that training needs is missing.
        FracTrainError: ``take`` raised it in the first process.
    """
    require_packages("training", "train")
    taken: list[HeldFolder] = []

    def first() -> Path:
        taken.append(take())
        return taken[0].path

    path = on_first(first)
    return taken[0] if taken else HeldFolder(path)


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


def _make(path: Path) -> list[Path]:
    """Make a folder and those above it; returns the ones that were missing, innermost first."""
    require_folder(path)
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    return missing


def _lock(path: Path) -> BaseFileLock | None:
    """The lock of a folder; ``None`` if another process has it."""
    from filelock import FileLock, Timeout

    lock = FileLock(path.resolve() / _LOCK, is_singleton=True, thread_local=False)
    with writing(path / _LOCK):
        try:
            lock.acquire(timeout=_PATIENCE)
        except Timeout:
            return None
    return lock


def _holder(path: Path) -> str:
    """Words about the process that holds a folder."""
    try:
        about = json.loads((path / _HOLDER).read_text(encoding="utf-8"))
        return "process {pid} on {host}, since {since} ({command})".format(**about)
    except (OSError, ValueError, KeyError, TypeError):  # not written yet
        return "it has just started"


def _is_written(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _before(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-before-{number}{path.suffix}")
