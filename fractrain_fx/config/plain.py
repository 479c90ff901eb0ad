"""Convert a configuration to plain values for JSON and YAML, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fractrain_fx.config.affine import AffineConfig
from fractrain_fx.config.clock import Steps, Tokens
from fractrain_fx.config.gate import GateConfig
from fractrain_fx.config.kinds import known_keys, made, require_sequence
from fractrain_fx.config.pins import Pin
from fractrain_fx.config.precision import CostTargets
from fractrain_fx.config.run import RunConfig
from fractrain_fx.config.schedule import parse_schedule
from fractrain_fx.durable import write_text
from fractrain_fx.errors import ConfigError

if TYPE_CHECKING:
    from fractrain_fx.config import FracConfig

__all__ = ["GROUPS", "changed_fields", "given_fields", "plain_values", "read_yaml", "write_yaml"]

_PINS = "['layer4.*=FW-8/BW-8']"

GROUPS: dict[str, type] = {"affine": AffineConfig, "gate": GateConfig, "run": RunConfig}
"""The fields that are dataclasses of one kind."""


def plain_values(config: FracConfig) -> dict[str, Any]:
    """The configuration as numbers, words, lists and mappings."""
    plain = asdict(config)
    plain["precision"] = str(config.precision)
    plain["stages"] = str(config.stages)
    plain["options"] = [str(option) for option in config.options]
    if (targets := config.targets) is not None:
        per_cent = list(targets.per_cent)
        plain["targets"] = {"per_cent": per_cent, "saturate": True} if targets.saturate else per_cent
    plain["pins"] = [pin.to_dict() for pin in config.pins]
    plain["schedule"] = {"kind": config.schedule.kind, **_plain_fields(config.schedule)}
    return plain | {name: _plain_fields(getattr(config, name)) for name in GROUPS}


def _plain_fields(group: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        return str(value) if isinstance(value, Steps | Tokens) else value

    return {f.name: plain(getattr(group, f.name)) for f in fields(group)}


def given_fields(cls: type[FracConfig], values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that build ``cls`` from plain values.

    Raises:
        ConfigError: a key is not a field (the message offers near names), or a pin is not a rule.
    """
    known_keys(cls, values)
    arguments = dict(values)
    for name, kind in (GROUPS | {"targets": CostTargets}).items():
        if isinstance(arguments.get(name), Mapping):
            arguments[name] = made(kind, arguments[name])
    if arguments.get("pins") is not None:
        require_sequence("pins", arguments["pins"], _PINS)
        arguments["pins"] = tuple(map(_pin, arguments["pins"]))
    elif "pins" in arguments:
        arguments["pins"] = ()
    return arguments


def changed_fields(config: FracConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that ``changes`` set, where ``gate.beta`` is a field of the group ``gate``.

    Raises:
        ConfigError: a name is unknown, or a dotted one does not name a field of a group.
    """
    known_keys(type(config), [name.partition(".")[0] for name in changes])
    fields = {name: value for name, value in changes.items() if "." not in name}
    for name in changes:
        head, dot, part = name.partition(".")
        if not dot:
            continue
        group = fields.get(head, getattr(config, head))
        group = parse_schedule(group) if head == "schedule" else group
        if not is_dataclass(group) or isinstance(group, type):
            raise ConfigError(f"{name} is unknown: {head}={group!r} has no fields")
        known_keys(type(group), [part])
        fields[head] = replace(group, **{part: changes[name]})
    return fields


def _pin(value: Any) -> Pin:
    if isinstance(value, Pin):
        return value
    if isinstance(value, str):
        return Pin.parse(value)
    if not isinstance(value, Mapping) or "pattern" not in value:
        raise ConfigError(f"pins has {value!r}, which is not a rule with a pattern: write pins={_PINS}")
    return made(Pin, value)


def write_yaml(path: str | Path, values: dict[str, Any]) -> None:
    """Write plain values in their order; a file that is there is replaced in one step."""
    import yaml

    write_text(Path(path), yaml.safe_dump(values, sort_keys=False))


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
