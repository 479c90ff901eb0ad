"""Write files so that a killed process leaves the old file or the new one, never a part."""

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
    """Wait until a file, or the names in a folder, are on disk."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open folders, and writes their names itself
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
