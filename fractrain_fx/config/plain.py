"""Convert a configuration to plain values for JSON and YAML, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fractrain_fx.config.gate import GateConfig
from fractrain_fx.config.kinds import require_sequence
from fractrain_fx.config.pins import Pin
from fractrain_fx.errors import ConfigError, near

if TYPE_CHECKING:
    from fractrain_fx.config import FracConfig

__all__ = ["given_fields", "known_keys", "plain_values", "read_yaml", "write_yaml"]

_PINS = "['layer4.*=FW-8/BW-8']"


def plain_values(config: FracConfig) -> dict[str, Any]:
    """The configuration as numbers, words, lists and mappings."""
    plain = asdict(config)
    plain["precision"] = str(config.precision)
    plain["stages"] = str(config.stages)
    plain["options"] = [str(option) for option in config.options]
    plain["targets"] = None if config.targets is None else list(config.targets.per_cent)
    amounts = {name: getattr(config, name) for name in ("every", "length")}
    plain |= {name: None if amount is None else str(amount) for name, amount in amounts.items()}
    plain["turns"] = [turn if isinstance(turn, float) else str(turn) for turn in config.turns]
    plain["pins"] = [pin.to_dict() for pin in config.pins]
    plain["gate"]["dims"] = list(config.gate.dims)
    return plain


def given_fields(cls: type[FracConfig], values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that build ``cls`` from plain values.

    Raises:
        ConfigError: a key is not a field (the message offers near names), or a pin is not a rule.
    """
    known_keys(cls, values)
    given = dict(values)
    if isinstance(given.get("gate"), Mapping):
        known_keys(GateConfig, given["gate"])
        given["gate"] = GateConfig(**given["gate"])
    if given.get("pins") is not None:
        require_sequence("pins", given["pins"], _PINS)
        given["pins"] = tuple(map(_pin, given["pins"]))
    elif "pins" in given:
        given["pins"] = ()
    return given


def _pin(value: Any) -> Pin:
    if isinstance(value, Pin):
        return value
    if isinstance(value, str):
        return Pin.parse(value)
    if not isinstance(value, Mapping) or "pattern" not in value:
        raise ConfigError(f"pins has {value!r}, which is not a rule with a pattern: write pins={_PINS}")
    known_keys(Pin, value)
    return Pin(**value)


def write_yaml(path: str | Path, values: dict[str, Any]) -> None:
    """Write plain values in their order."""
    import yaml

    Path(path).write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")


def read_yaml(path: str | Path) -> Mapping[str, Any]:
    """Read the plain values of a file.

    Raises:
        ConfigError: there is no such file, it cannot be read, is not YAML, or has no fields.
    """
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist: give a YAML file with lines like 'method: fractrain'") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8: save it in that encoding") from error
    except OSError as error:
        raise ConfigError(f"{path} could not be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise ConfigError(f"{path} could not be read as YAML: {error}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} has no fields: write lines like 'method: fractrain'")
    return values


def known_keys(cls: type, values: Mapping[str, Any]) -> None:
    """Raise a ``ConfigError`` for a key that is no field of ``cls``; it offers near names."""
    known = [f.name for f in fields(cls)]
    for key in values:
        if key not in known:
            raise ConfigError(f"{cls.__name__} has no field {key!r}; it has {', '.join(known)}.{near(str(key), known)}")
