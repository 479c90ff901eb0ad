"""The command line of a run: flags for its usual settings, ``--set`` for all of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from fractrain_fx.config import CostTargets, FracConfig, paper_values
from fractrain_fx.config.plain import GROUPS, read_yaml
from fractrain_fx.config.schedule import SCHEDULES
from fractrain_fx.errors import ConfigError, near
from fractrain_fx.training.override import from_recipe, merged, overridden
from fractrain_fx.training.settings import RunSettings, TrainSettings, flat_name

__all__ = ["add_flags", "as_setting", "given_settings", "names_data", "settings_of", "settings_text"]

# The settings that have a flag, by group, with the kind and the help of each.
_FLAGS: dict[str, dict[str, tuple[type, str]]] = {
    "what is trained, and on what": {
        "model": (str, "timm:NAME, hf:TYPE, zoo:NAME or FILE.py:FUNCTION"),
        "data": (str, "digits, pydoc, cifar10, cifar100, imagenet, wikitext103, text or characters"),
        "data_dir": (str, "folder of the data set's files"),
        "image_size": (int, "side of the images"),
        "subset": (int, "at most so many training and test samples"),
        "setting": (str, "standard, adaptation or fine-tuning"),
    },
    "the loop": {
        "epochs": (int, "length of the run"),
        "iterations": (int, "length of the run in optimizer steps"),
        "batch_size": (int, "samples of a batch in one process"),
        "optimizer": (str, "sgd, adam or adamw"),
        "lr": (float, "peak learning rate"),
        "lr_schedule": (str, "cosine, steps, inverse-sqrt or constant"),
        "weight_decay": (float, "weight decay"),
        "seed": (int, "seed of weights, order of samples and noise"),
        "device": (str, "auto, cpu, cuda or mps"),
        "mixed_precision": (str, "no, fp16 or bf16, for ops that are not quantized"),
        "compile": (bool, "use torch.compile on the whole model"),
    },
    "the method": {
        "method": (str, "float, static, pfq, dfq, fractrain or slu"),
        "format": (str, "affine, dorefa, wageubn, mx, nvfp4, fp8 or int"),
        "precision": (str, "precision of static"),
        "stages": (str, "precisions of pfq"),
        "options": (str, "options of the gates of dfq and fractrain"),
        "weight_bits": (int, "bits of gated weights"),
        "targets": (float, "cp of each stage of fractrain, in per cent; dfq and slu hold the last one"),
        "schedule": (str, "by-length, auto, two-stage, manual, cyclic, fixed or constant"),
        "pins": (str, "rules for some contractions, such as last=FW-8/BW-16"),
    },
}
_LISTS = ("options", "targets", "pins")
_METAVARS = {
    "data_dir": "DIR",
    "pins": "RULE",
    "options": "FW-3/BW-6",
    "targets": "PER_CENT",
    "stages": "FW(3,8)/BW(6,8)",
    "precision": "FW-8/BW-8",
}
_BY_KIND = {int: "N", float: "X", str: "NAME"}
# Flags that only training has, beside those of the loop.
_ONLY_TRAINING = ("model", "subset", "setting")
_LIST_ALL = "fractrain train --set help"


def add_flags(parser: Any, *, loop: bool = True) -> None:
    """Give a parser a flag for each of the usual settings, ``--set`` and ``--as``; a flag not given is ``None``.

    Args:
        parser: a parser of jsonargparse.
        loop: include the flags that only training needs, and ``--model``.
    """
    defaults = RunSettings().to_dict()
    start = parser.add_argument_group("where the settings come from")
    start.add_argument("--config", metavar="FILE", type=str, help="YAML file with settings; flags override it")
    if loop:
        start.add_argument(
            "--recipe", metavar="NAME", type=str, help="the paper's run to start from (fractrain zoo list)"
        )
    about = "paper: the method's settings as the paper prints them (docs/how-to/training.md)"
    start.add_argument("--as", metavar="paper", type=str, help=about)
    about = f"any setting, such as gate.beta=1e-3; may be repeated ('{_LIST_ALL}' lists them)"
    start.add_argument("--set", metavar="NAME=VALUE", action="append", type=str, help=about)
    for title, flags in _FLAGS.items():
        if title == "the loop" and not loop:
            continue
        group = parser.add_argument_group(title)
        for name, (kind, text) in flags.items():
            if name in _ONLY_TRAINING and not loop:
                continue
            flag, text = f"--{name.replace('_', '-')}", f"{text} (default: {_text(defaults[name])})".replace("%", "%%")
            if kind is bool:
                group.add_argument(flag, action="store_true", default=None, help=text)
                continue
            many: dict[str, Any] = {"nargs": "+"} if name in _LISTS else {}
            metavar = _METAVARS.get(name, _BY_KIND[kind])
            group.add_argument(flag, type=kind, metavar=metavar, help=text, **many)


def given_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were on the command line, as ``RunSettings.from_dict`` takes them.

    Raises:
        ConfigError: ``--set`` has no value, names no setting, or names one that another flag sets too.
    """
    flags = {"recipe", *(name for group in _FLAGS.values() for name in group)}
    settings = {name: value for name, value in arguments.items() if name in flags and value is not None}
    also: dict[str, Any] = {}
    for text in arguments["set"] or ():
        name, equals, value = text.partition("=")
        _require_setting(name, equals)
        setting = _value(value)
        by_word = name == "schedule" and not isinstance(setting, Mapping)
        head, _, part = ("schedule.kind" if by_word else name).partition(".")
        holder = also.setdefault(head, {}) if part else also
        if (part or head) in holder or name in settings:
            raise ConfigError(f"{name} is given twice: leave out one of the two")
        holder[part or head] = setting
    return merged(settings, also)


def settings_of(arguments: Mapping[str, Any]) -> RunSettings:
    """The settings of a command: from ``--config`` or ``--recipe``, then ``--as``; flags and ``--set`` override both.

    Raises:
        ConfigError: a value does not fit, ``--config`` and ``--recipe`` are both given, or there are no settings of the
            name after ``--as``.
    """
    changes = given_settings(arguments)
    if arguments["config"] is None:
        start = RunSettings.from_dict({"recipe": changes.get("recipe")})
    elif "recipe" in changes:
        raise ConfigError("--config and --recipe both say where the settings start from: leave one out")
    else:
        start = RunSettings.from_yaml(Path(arguments["config"]))
    values, name = start.to_dict(), arguments["as"]
    if name not in (None, "paper"):
        raise ConfigError(f"--as {name} is unknown: write --as paper, or leave it out")
    named = {} if name is None else paper_values(changes.get("method", values["method"]))
    return RunSettings.from_dict(overridden(overridden(values, named), changes))


def names_data(arguments: Mapping[str, Any]) -> bool:
    """Whether a command names a data set: by a flag or ``--set``, or in its file or recipe."""
    start = {} if arguments["config"] is None else read_yaml(arguments["config"])
    return "data" in from_recipe({**start, **given_settings(arguments)})


def as_setting(flag: str) -> str:
    """How to give a setting that has no flag of its own, as a phrase; empty if no setting has that name."""
    name = flag.strip("-").replace("-", "_")
    names = [setting for setting in _settings() if name in (setting, setting.rpartition(".")[2])]
    return f" Write --set {names[0]}=VALUE." if names else ""


def settings_text() -> str:
    """Each setting that ``--set`` takes, with its default and its description."""
    lines = []
    for name, (default, text) in _settings().items():
        lines.append(f"{name} (default: {default})\n    {text}")
    return "\n".join(lines)


def _settings() -> dict[str, tuple[str, str]]:
    """By name, the default and the description of each setting."""
    defaults, settings = RunSettings().to_dict(), {}
    for part in (RunSettings, TrainSettings, FracConfig):
        texts = dict(_attributes(part))
        for field in fields(part):
            name = flat_name(part, field.name)
            if name in defaults and name not in GROUPS:
                default = defaults[name]["kind"] if name == "schedule" else _text(defaults[name])
                settings[name] = (default, texts[field.name])
    for group, kind in GROUPS.items():
        for name, text in _attributes(kind):
            if name in defaults[group]:
                settings[f"{group}.{name}"] = (_text(defaults[group][name]), text)
    settings["targets.saturate"] = ("False", dict(_attributes(CostTargets))["saturate"])
    for schedule in SCHEDULES.values():
        usual = {f.name: f.default for f in fields(schedule)}
        settings |= {f"schedule.{name}": (_text(usual[name]), text) for name, text in _attributes(schedule)}
    return settings


def _require_setting(name: str, equals: str) -> None:
    known = _settings()
    if name not in known:
        if name in GROUPS:
            parts = [setting for setting in known if setting.startswith(f"{name}.")]
            raise ConfigError(f"--set {name} is a group of settings: write one of {', '.join(parts)}")
        close = near(name, known) or near(name, {setting.rpartition(".")[2] for setting in known})
        raise ConfigError(f"--set {name}: a run has no such setting.{close} '{_LIST_ALL}' lists all")
    if not equals:
        raise ConfigError(f"--set {name} has no value: write --set {name}=VALUE (default: {known[name][0]})")


def _value(text: str) -> Any:
    """A number, a list or a word, as YAML reads it; ``1e-3`` is a number too, and ``no`` a word."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set: {text!r} could not be read as a value: {error}") from error
    return text if isinstance(value, bool) and text.lower() not in ("true", "false") else value


def _attributes(cls: type) -> Iterator[tuple[str, str]]:
    """Names and descriptions from the ``Attributes`` section of a docstring."""
    _, _, rest = (inspect.getdoc(cls) or "").partition("Attributes:\n")
    section, _, _ = rest.partition("\n\n")
    for entry in filter(None, re.split(r"\n(?= {4}\w)", section.rstrip())):
        names, _, text = entry.partition(":")
        for name in names.split(","):
            yield name.strip(), " ".join(re.sub(r":\w+:`([^`]*)`", r"\1", text).replace("``", "").split())


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(value.get("kind", value))
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    return "automatic" if value is None else str(value)
