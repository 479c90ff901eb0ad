"""Machines by name, and their figures with sources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from fractrain_fx.errors import ConfigError, near
from fractrain_fx.hardware.accelerators import ACCELERATORS
from fractrain_fx.hardware.bitfusion_machine import BitFusion
from fractrain_fx.hardware.machine import Machine
from fractrain_fx.hardware.measured import this_cpu
from fractrain_fx.hardware.zc706 import ZC706

__all__ = ["MACHINES", "find_machine", "machine_rows"]

_BOARDS = {board.name: board for board in ACCELERATORS}
_FIGURES = ("peak", "bandwidth", "watts", "computes", "streams", "sources")

MACHINES: dict[str, str] = {
    **{name: board.title for name, board in _BOARDS.items()},
    "cpu": "this processor, measured when it is asked for",
    "bitfusion": "BitFusion, the accelerator that the paper simulates",
    "zc706": "Xilinx ZC706, the FPGA board of the paper's edge experiment",
}
"""Names that ``find_machine`` knows, and what they stand for."""


def find_machine(name: str | Machine) -> Machine:
    """A machine by its name, or the machine itself; ``cpu`` is measured, which takes about a second."""
    if not isinstance(name, str):
        if isinstance(name, type) or not callable(getattr(name, "step", None)):
            raise ConfigError(
                f"machine={name!r} is not a machine: write a name such as 'h200', or an object with step()"
            )
        return name
    if name in _BOARDS:
        return _BOARDS[name]
    makers: dict[str, Callable[[], Machine]] = {"cpu": this_cpu, "bitfusion": BitFusion, "zc706": ZC706}
    if name not in makers:
        raise ConfigError(
            f"machine={name!r} is not known.{near(name, MACHINES, 1)} 'fractrain machines' lists {', '.join(MACHINES)}"
        )
    return makers[name]()


def machine_rows() -> list[dict[str, Any]]:
    """Every machine as plain values; peaks in operations a second, bandwidth in bytes a second."""
    figures = {name: {key: asdict(board)[key] for key in _FIGURES} for name, board in _BOARDS.items()}
    return [{"name": name, "title": title, **figures.get(name, {})} for name, title in MACHINES.items()]
