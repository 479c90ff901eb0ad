"""Files that a killed process leaves old or new, never a part; errors of disks in words; the folder of caches."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from fractrain_fx.errors import RunError

__all__ = ["require_file", "require_folder", "sync", "user_cache", "write_text", "writing"]


def write_text(path: Path, text: str) -> None:
    """Replace a file's content in one step.

    Raises:
        RunError: as :func:`writing`.
    """
    draft = path.with_name(f".{path.name}.draft")
    with writing(path):
        draft.write_text(text, encoding="utf-8")
        sync(draft)
        os.replace(draft, path)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open folders, and writes their names itself
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def require_folder(path: Path) -> None:
    """Check that ``path`` is a folder that can be written to, or that it can be made.

    Raises:
        RunError: a file is in its place, or the folder that would hold it is read-only.
    """
    try:
        there = next(place for place in (path, *path.absolute().parents) if place.exists())
    except OSError as error:
        raise RunError(f"{path} cannot be a folder ({error.strerror}): write to another one") from error
    if not there.is_dir():
        raise RunError(f"{path} cannot be a folder, because {there} is a file: write to another one")
    if not os.access(there, os.W_OK | os.X_OK):
        raise RunError(f"{path} cannot be written to, because {there} is read-only: write to another folder")


def require_file(path: Path) -> None:
    """Check that a file can be written at ``path``, before the work of which it is the result.

    Raises:
        RunError: a folder is in its place, or its own folder does not exist or is read-only.
    """
    if path.is_dir():
        raise RunError(f"{path} is a folder: name a file in it")
    if not path.absolute().parent.exists():
        raise RunError(f"{path} cannot be written, because its folder does not exist: make that, or name another")
    require_folder(path.absolute().parent)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Explain what fails inside while ``path`` is written.

    Raises:
        RunError: the disk is full, the folder is read-only or gone, or the file system fails in another way.
    """
    try:
        yield
    except OSError as error:
        cause = error.strerror or str(error)
        raise RunError(f"{path} could not be written ({cause}): make room, or write to another folder") from error


def user_cache() -> Path:
    """The user's folder for files that can be made again: ``XDG_CACHE_HOME``, or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
