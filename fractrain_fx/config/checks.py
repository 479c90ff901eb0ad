"""Refuse configurations whose settings do not fit together, or of which one would change nothing."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from fractrain_fx.config.affine import AffineConfig
from fractrain_fx.config.gate import GateConfig
from fractrain_fx.config.precision import FLOAT_BITS, SKIP, CostTargets, Precision
from fractrain_fx.config.products import BLOCK_FORMATS
from fractrain_fx.config.recipes import check_recipe, widths_of
from fractrain_fx.config.run import CODE_BITS, TORCHAO_FORMATS
from fractrain_fx.config.schedule import Cyclic
from fractrain_fx.errors import ConfigError

if TYPE_CHECKING:
    from fractrain_fx.config import FracConfig

__all__ = ["check_config", "check_stage"]

# The methods or formats that read a setting; any other value than the default would change nothing under the others.
_READERS = {
    "precision": ("method", ("static",)),
    "stages": ("method", ("pfq",)),
    "options": ("method", ("dfq", "fractrain")),
    "weight_bits": ("method", ("dfq", "fractrain")),
    "targets": ("method", ("dfq", "fractrain", "slu")),
    "gate": ("method", ("dfq", "fractrain", "slu")),
    "affine": ("format", ("affine",)),
    "recipe": ("format", BLOCK_FORMATS),
}


def check_config(config: FracConfig) -> None:
    """Raise a ``ConfigError`` for fields out of range or that do not fit together."""
    _check_used(config)
    _check_options(config)
    check_recipe(config)
    _check_skipping(config)
    _check_stages_of_pins(config)
    _check_backend(config)
    _check_torchao(config)
    _check_gradient_bits(config)
    _check_length(config)
    if not (2 <= config.weight_bits <= 16 or config.weight_bits == FLOAT_BITS):
        raise ConfigError(f"weight_bits={config.weight_bits} must be 2 to 16, or 32 for float")


def check_stage(config: FracConfig, precision: Precision) -> None:
    """Raise a ``ConfigError`` for a precision that the scheduled ops of a model cannot have."""
    if not config.scheduled:
        way_out = ". set_target(...) moves what its gates cannot choose for" if config.schedules_rest else ""
        raise ConfigError(
            f"method {config.method!r} has no stage precision to set: 'static' and 'pfq' have one{way_out}"
        )
    if precision.skips:
        raise ConfigError(f"{precision} computes nothing, and only gates can skip: write 2 bits or more")
    staged = next((pin for pin in config.pins if len(pin.stages) > 1), None)
    if staged is not None and precision not in config.precision_stages:
        raise ConfigError(
            f"{precision} is not a stage of {config.stages}, and the rule for {staged.pattern!r} has bits for these "
            "only: set one of them"
        )
    if (recipe := config.product_recipe) is not None and (lacks := widths_of(recipe, precision)) is not None:
        raise ConfigError(lacks)


def _check_used(config: FracConfig) -> None:
    """Refuse a setting that would change nothing."""
    defaults = {field.name: field for field in fields(config)}
    for name, (kind, readers) in _READERS.items():
        chosen, value, field = getattr(config, kind), getattr(config, name), defaults[name]
        default = field.default if field.default_factory is MISSING else field.default_factory()
        by_pin = kind == "format" and any(pin.number_format in readers for pin in config.pins)
        if chosen not in readers and value != default and not (by_pin and name == "affine"):
            raise ConfigError(
                f"{_shown(name, value, default)} changes nothing for {kind} {chosen!r}: it is for "
                f"{', '.join(repr(reader) for reader in readers)}"
            )


def _shown(name: str, value: Any, default: Any) -> str:
    if isinstance(value, CostTargets):
        return f"{name}={list(value.per_cent)}"
    if isinstance(value, GateConfig | AffineConfig):
        pairs = [(field.name, getattr(value, field.name), getattr(default, field.name)) for field in fields(value)]
        return ", ".join(f"{name}.{part}={setting!r}" for part, setting, usual in pairs if setting != usual)
    return f"{name}={', '.join(map(str, value)) if isinstance(value, tuple) else value}"


def _check_options(config: FracConfig) -> None:
    if len(set(config.options)) != len(config.options):
        raise ConfigError(f"options {', '.join(map(str, config.options))} name one precision twice")
    if SKIP in config.options[1:]:
        raise ConfigError(
            "FW-0/BW-0 must come first among the options, because blocks without a skip path drop the first one"
        )
    if not any(not option.skips for option in config.options):
        raise ConfigError("options need at least one precision besides FW-0/BW-0")
    if config.precision.skips:
        raise ConfigError("static precision FW-0/BW-0 would remove the model: write 2 bits or more")


def _check_skipping(config: FracConfig) -> None:
    if config.run.left_out_from is not None and not config.dispatches:
        raise ConfigError(
            f"run.skipping={config.run.skipping!r} changes nothing for method {config.method!r} with these options: "
            "only gates with the option FW-0/BW-0 skip blocks, as those of FracConfig.paper() do. Write "
            "run.skipping='computed'"
        )
    if config.gate.gradient == "fisher" and (config.method == "slu" or config.dispatches):
        reason = "method 'slu', whose options round nothing"
        if config.dispatches:
            reason = "blocks that leave out the samples that skip them, and so do not know the size of the batch"
        raise ConfigError(
            f"gate.gradient='fisher' does not go with {reason}: write gate.gradient='straight-through'"
            f"{', or run.skipping=' + repr('computed') if config.method != 'slu' else ''}"
        )


def _check_stages_of_pins(config: FracConfig) -> None:
    """Check that rules with a precision for each stage fit the stages."""
    staged = [pin for pin in config.pins if len(pin.stages) > 1]
    if not staged or config.method == "float":
        return
    place = f"the rule for {staged[0].pattern!r} has a precision for each of {len(staged[0].stages)} stages"
    if config.method != "pfq":
        raise ConfigError(
            f"{place}, and only method 'pfq' has stages of precision, not {config.method!r}: write method='pfq' with "
            "as many stages, or one precision"
        )
    stages = config.precision_stages
    for pin in staged:
        if len(pin.stages) != len(stages):
            raise ConfigError(
                f"the rule for {pin.pattern!r} has {len(pin.stages)} precisions, and {config.stages} has {len(stages)} "
                "stages: give as many of each"
            )
    if len(set(stages)) != len(stages):
        raise ConfigError(f"{place}, which are told apart by their precision, and {config.stages} has one twice")
    if isinstance(config.schedule, Cyclic):
        raise ConfigError(
            f"{place}, and schedule='cyclic' trains between the stages: write schedule='by-length', 'auto' or 'manual'"
        )


def _check_backend(config: FracConfig) -> None:
    """Refuse a backend that was asked for by name and would compute nothing."""
    backend = config.run.backend
    if backend in ("auto", "plain"):
        return
    if config.rounds_by_kernels and (config.may_use_codes or not config.run.uses_codes):
        return
    computes = "format 'affine' with affine.ranges='tensor'"
    if config.run.uses_codes:
        computes += f" and affine.gradient_grid='range' at {CODE_BITS} forward bits or fewer, of weights too"
    else:
        computes += f" or 'sample', and {', '.join(BLOCK_FORMATS)}"
    raise ConfigError(
        f"run.backend={backend!r} changes nothing for method {config.method!r} with format {config.format!r} and these "
        f"settings: it computes {computes}. Write run.backend='auto'"
    )


def _check_torchao(config: FracConfig) -> None:
    """Refuse torchao where it cannot compute the linear layers."""
    if not config.run.torchao:
        return
    if not config.scheduled:
        raise ConfigError(
            f"run.torchao=True computes ops of one precision at a time, and method {config.method!r} has none: write "
            "method='static' or 'pfq', or leave it out"
        )
    recipes = [config.product_recipe, *(pin.product_recipe for pin in config.pins)]
    if not {name for recipe in recipes if recipe is not None for name in recipe.formats} & set(TORCHAO_FORMATS):
        raise ConfigError(
            f"run.torchao=True computes in formats {', '.join(TORCHAO_FORMATS)}, not in {config.format!r}: write one "
            "of these, or leave it out"
        )


def _check_gradient_bits(config: FracConfig) -> None:
    """Refuse gradients with the bits that each sample needs where gates or ranges do not allow them."""
    if config.affine.gradient_bits == "given" or (config.scheduled and config.affine.ranges == "tensor"):
        return
    reason = f"gates choose the backward bits of method {config.method!r}"
    if config.method in ("float", "slu"):
        reason = f"method {config.method!r} has no bits of gradients"
    elif config.scheduled:
        reason = f"affine.ranges={config.affine.ranges!r} gives samples ranges of their own, which take all bits"
    raise ConfigError(
        "affine.gradient_bits='needed' is for methods 'static' and 'pfq' with affine.ranges='tensor', and "
        f"{reason}: write affine.gradient_bits='given'"
    )


def _check_length(config: FracConfig) -> None:
    length, every = config.run.length, config.schedule.every
    if length is None or isinstance(length, int):
        return
    if type(length) is not type(every) or (every is not None and length.number < every.number):
        unit = "epochs" if every is None else f"{every.unit}, and at least that"
        raise ConfigError(
            f"run.length={str(length)!r} does not fit schedule.every={every if every is None else str(every)!r}: write "
            f"a length in {unit}"
        )
