"""Settings by name: those that the paper prints, and those that trained best so far (docs/gates.md has the numbers)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fractrain_fx.config.config import FracConfig
from fractrain_fx.config.precision import DFQ_OPTIONS, FINE_OPTIONS, PrecisionStages
from fractrain_fx.errors import ConfigError, near

__all__ = ["NAMES", "named_values", "paper_values", "tuned_config", "tuned_values"]

_GATED: dict[str, Any] = {
    "options": [str(option) for option in FINE_OPTIONS if not option.skips],
    "weight_bits": 4,
    "gate": {"control": "sign"},
}
_VALUES: dict[str, dict[str, Any]] = {
    "pfq": {"stages": "FW(5,6,7,8)/BW(8,8,8,8)", "schedule": "manual"},
    "dfq": {**_GATED, "targets": [3.8]},
    "fractrain": {**_GATED, "targets": [2.9, 3.4, 3.6, 3.8], "schedule": "manual"},
}

_STAGES = {"schedule": {"kind": "auto", "epsilon": 0.05, "alpha": 0.3}}
_PAPER_GATES: dict[str, Any] = {
    "options": list(map(str, DFQ_OPTIONS)),
    "weight_bits": 6,
    "gate": {"control": "sign", "dims": [32, 16], "hidden": 16},
}
_PAPER: dict[str, dict[str, Any]] = {
    "float": {},
    "static": {"precision": "FW-8/BW-8"},
    "pfq": {"stages": str(PrecisionStages()), **_STAGES},
    "dfq": _PAPER_GATES,
    "fractrain": {**_PAPER_GATES, **_STAGES},
    "slu": {"gate": _PAPER_GATES["gate"]},
}


def paper_values(method: str) -> Mapping[str, Any]:
    """The settings that the paper prints for a method (supplement 4 to 7), as :meth:`FracConfig.from_dict` takes them.

    Targets are left to their default, which are the paper's, moved into reach of the model.

    Raises:
        ConfigError: there is no such method.
    """
    if method not in _PAPER:
        raise ConfigError(f"method {method!r} is unknown: write one of {', '.join(_PAPER)}.{near(method, _PAPER)}")
    return _PAPER[method]


def tuned_values(method: str) -> Mapping[str, Any]:
    """The tuned settings of a method, by name, as :meth:`FracConfig.from_dict` takes them.

    Raises:
        ConfigError: there are none for this method.
    """
    if method not in _VALUES:
        raise ConfigError(f"method {method!r} has no tuned settings: {', '.join(_VALUES)} have.{near(method, _VALUES)}")
    return _VALUES[method]


def tuned_config(method: str = "fractrain", **changes: Any) -> FracConfig:
    """A configuration with the settings of ``method`` that trained best so far.

    They cost more than the paper's. ``fractrain`` takes 59 per cent of what static FW-8/BW-8 training does, and no gate
    skips a block; its stages, and those of ``pfq``, get the same time each, so they need the length of the run.

    Args:
        method: ``pfq``, ``dfq`` or ``fractrain``.
        changes: fields of :class:`FracConfig` with another value, such as ``run=RunConfig(length=30)``.

    Raises:
        ConfigError: the method has no tuned settings, or a value does not fit.
    """
    return FracConfig.from_dict({"method": method, **tuned_values(method)}).replace(**changes)


_NAMED = {"paper": paper_values, "tuned": tuned_values}
NAMES = tuple(_NAMED)
"""The names that ``--as`` takes."""


def named_values(name: str, method: str) -> Mapping[str, Any]:
    """The settings of a method under one of ``NAMES``.

    Raises:
        ConfigError: the name is unknown, or the method has no such settings.
    """
    if name not in _NAMED:
        raise ConfigError(f"--as {name} is unknown: write one of {', '.join(_NAMED)}.{near(name, _NAMED)}")
    return _NAMED[name](method)
