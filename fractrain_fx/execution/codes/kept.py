"""Timings of products, kept on disk for later runs on the same machine with the same versions and kernels."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from fractrain_fx.durable import user_cache, write_text
from fractrain_fx.errors import MissingPackageError, RunError, require_packages
from fractrain_fx.native.build import library

__all__ = ["keep", "processor", "recall"]

_LOG = logging.getLogger(__name__)

# A folder to keep timings in, or "off"; by default the user's cache.
VARIABLE = "FRACTRAIN_FX_TIMINGS"

# Seconds to wait for other processes that write; a timing that is not kept is only made again.
_PATIENCE = 5.0

# Seconds of both forms, in float and on int8.
Seconds = tuple[float, float]


def recall(kind: str) -> Seconds | None:
    """The timing of a kind of product; ``None`` if there is none, or if timings are not kept.

    Args:
        kind: everything that the time depends on, apart from machine, threads and versions.
    """
    file = _file()
    return None if file is None else _read(file).get(kind)


def keep(kind: str, seconds: Seconds) -> None:
    """Add a timing to the file. Timings of other processes stay; what cannot be written is logged and not kept."""
    file = _file()
    if file is None:
        return
    try:
        require_packages("keeping timings", "train")
    except MissingPackageError as error:
        _LOG.info("a timing was not kept: %s", error)
        return
    from filelock import FileLock, Timeout

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_suffix(".lock"), timeout=_PATIENCE):
            timings = _read(file) | {kind: seconds}
            write_text(file, json.dumps({"about": _about(), "timings": timings}, indent=1) + "\n")
    except (OSError, RunError, Timeout) as error:
        _LOG.info("a timing was not kept: %s", error)


def _file() -> Path | None:
    """The file of this machine; ``None`` if timings are not kept."""
    place = os.environ.get(VARIABLE)
    if place == "off":
        return None
    user = user_cache() / "fractrain_fx" / "timings"
    state = json.dumps(_about())
    return (Path(place) if place else user) / f"int8-{hashlib.sha256(state.encode()).hexdigest()[:12]}.json"


def _read(file: Path) -> dict[str, Seconds]:
    try:
        held = json.loads(file.read_text(encoding="utf-8"))["timings"]
        return {str(kind): (float(plain), float(int8)) for kind, (plain, int8) in held.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _LOG.warning("%s holds no timings (%r), and will be replaced", file, error)
        return {}


def _about() -> dict[str, str]:
    """Everything that the times of all products depend on."""
    machine = f"{processor()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    return {"machine": machine, "torch": torch.__version__, "fractrain_fx": _version(), "kernels": _kernels()}


@cache
def _kernels() -> str:
    return library().stem  # of its source and flags


@cache
def _version() -> str:
    try:
        return metadata.version("fractrain_fx")
    except metadata.PackageNotFoundError:  # its folder is on the path, and it was never installed
        return "not installed"


@cache
def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
