"""The command-line flags of a run, made from the settings dataclasses and their docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fractrain_fx.config import NAMES, FracConfig, GateConfig, Pin, named_values
from fractrain_fx.errors import ConfigError
from fractrain_fx.training.override import overridden
from fractrain_fx.training.settings import RunSettings, TrainSettings, flat_name

__all__ = ["add_flags", "given_flags", "settings_of"]

# Fields that take several values, with the type of each. Other fields are read as the first type in their annotation;
# the dataclasses check the values.
_LISTS: dict[str, type] = {
    "options": str,
    "turns": str,
    "targets": float,
    "pins": str,
    "dims": int,
    "milestones": float,
    "betas": float,
}
_EXAMPLES = {
    "pins": "PATTERN=FW-8/BW-16|FORMAT",
    "options": "FW-3/BW-6",
    "targets": "PER_CENT",
    "stages": "FW(3,8)/BW(6,8)",
}
_EXAMPLES |= {"every": "'N steps'", "turns": "SHARE"}
_ONLY_TRAINING = {"model", "subset", "test_subset", "setting", "pretrain_epochs", "split_seed", "augment"}
_TYPES: dict[str, type] = {"int": int, "float": float}


def add_flags(parser: Any, *, loop: bool = True) -> None:
    """Give a parser one flag for each setting of a run, ``--as`` and ``--tuned``; a flag not given is ``None``.

    Args:
        parser: a parser of jsonargparse.
        loop: include the flags that only training needs, and ``--model``.
    """
    defaults = RunSettings().to_dict()
    groups: list[tuple[str, type[Any], str]] = [
        ("what is trained, and on what", RunSettings, ""),
        ("the method", FracConfig, ""),
        ("the gates", GateConfig, "gate."),
    ]
    if loop:
        groups.insert(1, ("the loop", TrainSettings, ""))
    seen = {"train", "frac", "gate", "length"}
    if not loop:
        seen |= {"model", "subset", "test_subset", "setting", "pretrain_epochs", "split_seed", "recipe"}
    for title, cls, prefix in groups:
        group = parser.add_argument_group(title)
        help_texts = dict(_attributes(cls))
        shown = defaults["gate"] if prefix else defaults
        if cls is FracConfig:
            text = (
                "the method's settings by name: those of the paper, or those that trained best so far (docs/gates.md)"
            )
            group.add_argument("--as", metavar="|".join(NAMES), type=str, help=f"{text}; other flags override them")
            group.add_argument("--tuned", action="store_true", default=None, help="the same as --as tuned")
        for field in fields(cls):
            name = flat_name(cls, field.name)
            if name in seen:
                continue
            seen.add(name)
            flag = "--" + prefix + name.replace("_", "-")
            names = [flag] if "_" not in name else [flag, "--" + prefix + name]
            text = f"{help_texts[field.name]} (default: {_text(shown[name])})".replace("%", "%%")
            if field.type == "bool":
                group.add_argument(*names, action="store_true", default=None, help=text)
                continue
            options: dict[str, Any] = {"nargs": "+"} if field.name in _LISTS else {}
            kind = _LISTS.get(field.name) or _TYPES.get(str(field.type).split(" ")[0], str)
            metavar = _EXAMPLES.get(name, name.upper())
            group.add_argument(*names, type=kind, metavar=metavar, help=text, **options)


def given_flags(parsed: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were on the command line, as ``RunSettings.from_dict`` takes them.

    Raises:
        ConfigError: a pin is not ``PATTERN=PRECISION`` or ``PATTERN=FORMAT``.
    """
    known = RunSettings().to_dict().keys()
    given = {key: value for key, value in parsed.items() if key in known and value is not None}
    gate = {key: value for key, value in given.pop("gate", {}).items() if value is not None}
    if gate:
        given["gate"] = gate
    if "pins" in given:
        given["pins"] = [Pin.parse(text) for text in given["pins"]]
    return given


def settings_of(arguments: Mapping[str, Any]) -> RunSettings:
    """The settings of a command: from ``--config`` or ``--recipe``, then ``--as`` or ``--tuned``; flags override both.

    Raises:
        ConfigError: a value does not fit, ``--config`` and ``--recipe`` are both given, or ``--as`` and ``--tuned``, or
            the method has no settings of that name.
    """
    given = given_flags(arguments)
    if arguments["config"] is None:
        start = RunSettings.from_dict({"recipe": given.get("recipe")})
    elif "recipe" in given:
        raise ConfigError("--config and --recipe both say where the settings start from: leave one out")
    else:
        start = RunSettings.from_yaml(Path(arguments["config"]))
    values = start.to_dict()
    name = "tuned" if arguments["tuned"] else arguments["as"]
    if arguments["tuned"] and arguments["as"] not in (None, name):
        raise ConfigError(f"--tuned and --as {arguments['as']} both name settings: leave one out")
    named = {} if name is None else named_values(name, given.get("method", values["method"]))
    return RunSettings.from_dict(overridden(overridden(values, named), given))


def _attributes(cls: type) -> Iterator[tuple[str, str]]:
    """Names and descriptions from the ``Attributes`` section of a docstring."""
    _, _, rest = (inspect.getdoc(cls) or "").partition("Attributes:\n")
    section, _, _ = rest.partition("\n\n")
    for entry in re.split(r"\n(?= {4}\w)", section.rstrip()):
        names, _, text = entry.partition(":")
        for name in names.split(","):
            yield name.strip(), " ".join(re.sub(r":\w+:`([^`]*)`", r"\1", text).replace("``", "").split())


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    return "automatic" if value is None else str(value)
