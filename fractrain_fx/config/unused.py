"""Refuse settings that nothing reads under the chosen method or schedule."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from fractrain_fx.config.gate import GateConfig
from fractrain_fx.config.precision import CostTargets
from fractrain_fx.errors import ConfigError

if TYPE_CHECKING:
    from fractrain_fx.config import FracConfig

__all__ = ["check_used"]

# The methods or schedules that read a setting; any other value than the default would change nothing under the others.
_READERS = {
    "precision": ("method", ("static",)),
    "stages": ("method", ("pfq",)),
    "options": ("method", ("dfq", "fractrain")),
    "weight_bits": ("method", ("dfq", "fractrain")),
    "targets": ("method", ("dfq", "fractrain", "slu")),
    "gate": ("method", ("dfq", "fractrain", "slu")),
    "epsilon": ("schedule", (None, "auto", "two-stage")),
    "alpha": ("schedule", (None, "auto", "two-stage")),
    "cycles": ("schedule", ("cyclic",)),
}


def check_used(config: FracConfig) -> None:
    """Raise a ``ConfigError`` for a setting that would change nothing."""
    defaults = {each.name: each for each in fields(config)}
    for name, (kind, readers) in _READERS.items():
        chosen, value, field = getattr(config, kind), getattr(config, name), defaults[name]
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if chosen not in readers and value != default:
            raise ConfigError(
                f"{_shown(name, value, default)} changes nothing {_under(kind, chosen)}: it is for "
                f"{', '.join(repr(reader) for reader in readers if reader is not None)}"
            )


def _under(kind: str, chosen: str | None) -> str:
    return f"without a {kind} that reads it" if chosen is None else f"for {kind} {chosen!r}"


def _shown(name: str, value: Any, default: Any) -> str:
    if isinstance(value, CostTargets):
        return f"{name}={list(value.per_cent)}"
    if isinstance(value, GateConfig):
        pairs = [(each.name, getattr(value, each.name), getattr(default, each.name)) for each in fields(value)]
        return ", ".join(f"{name}.{part}={given!r}" for part, given, usual in pairs if given != usual)
    return f"{name}={', '.join(map(str, value)) if isinstance(value, tuple) else value}"
