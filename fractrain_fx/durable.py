"""Writing files so that a process that is killed leaves the old one or the new one, never half of one."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["sync", "write_text"]


def write_text(path: Path, text: str) -> None:
    """Replace a file's content in one step."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    sync(draft)
    os.replace(draft, path)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on disk before going on."""
    if os.name == "nt" and path.is_dir():  # Windows opens no folders, and keeps their names by itself
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
