"""The rows of a sweep in a JSON file, written after each model so that a sweep can continue where it stopped."""

from __future__ import annotations

import gzip
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.coverage.cases import Case
from benchmarks.coverage.trial import Row, passed

__all__ = ["Results", "commit", "without_paths"]

_PACKAGES = re.compile(r"/[^\s\"'()]*/(?:site-packages|\.venv[^\s\"'()/]*|lib/python3\.\d+)/")
_CHECKOUT = re.compile(r"/[^\s\"'()]*/(?=benchmarks/coverage/)")
_TEMPORARY = re.compile(r"/tmp/[^\s\"'(),;:\\]+")
_LIBRARIES = ("torch", "timm", "transformers", "torchvision")
_AND = " and "


class Results:
    """The rows of a file by ``suite/name``, and the number of models that each suite lists.

    Args:
        path: the file, read if it exists; gzip if the name ends with ``.gz``. A missing folder is made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        held = _read(path) if path.exists() else {}
        self.rows: dict[str, Row] = held.get("models", {})
        self.known: dict[str, int] = held.get("known", {})
        self._commit = commit()
        # A file whose rows were made with several versions names them all.
        self.made_with: dict[str, str] = held.get("made_with", {})

    def open(self, key: str, retry: bool) -> bool:
        """Whether a sweep runs this model: it has no row yet or, with ``retry``, its row did not pass."""
        return key not in self.rows or (retry and not passed(self.rows[key]))

    def add(self, case: Case, row: Row) -> None:
        """Add a row and write the file."""
        self.rows[case.key] = json.loads(without_paths(json.dumps(asdict(case) | row | {"commit": self._commit})))
        self._note({"python": platform.python_version()} | {name: version(name) for name in _LIBRARIES})
        self.write()

    def take(self, path: Path) -> None:
        """Take from another file the rows that this one lacks or that did not pass here."""
        held = _read(path)
        self.known = held.get("known", {}) | self.known
        self._note(held.get("made_with", {}))
        for key, row in held.get("models", {}).items():
            if self.open(key, retry=True):
                self.rows[key] = row

    def _note(self, made_with: Mapping[str, str]) -> None:
        for name, versions in made_with.items():
            known = [older for older in self.made_with.get(name, "").split(_AND) if older]
            self.made_with[name] = _AND.join(dict.fromkeys([*known, *versions.split(_AND)]))

    def write(self) -> None:
        """Replace the file in one step, so that an interrupted sweep leaves it whole."""
        part = self._path.with_suffix(".part")
        held = {"made_with": self.made_with, "known": self.known, "models": self.rows}
        text = json.dumps(held, indent=1).encode()
        part.write_bytes(gzip.compress(text, mtime=0) if self._path.suffix == ".gz" else text)
        os.replace(part, self._path)


def _read(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    held: dict[str, Any] = json.loads(without_paths(text))
    return held


def without_paths(text: str) -> str:
    """A text without the folders of Python, packages, this checkout and temporary files: each machine has others."""
    return _TEMPORARY.sub("a folder", _CHECKOUT.sub("", _PACKAGES.sub("", text)))


def commit() -> str:
    """The commit of the code that makes the rows; ``+`` marks uncommitted changes."""
    git = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--exclude=*", "--dirty=+")
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
