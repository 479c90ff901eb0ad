"""Refuse wrong configurations: unknown words, numbers out of range, options that would change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from fractrain_fx.config.choices import CHOICES, CODE_BITS, TORCHAO_FORMATS, TORCHAO_PRECISION
from fractrain_fx.config.clock import check_clock
from fractrain_fx.config.precision import FLOAT_BITS, SKIP, Precision
from fractrain_fx.config.products import BLOCK_FORMATS
from fractrain_fx.config.recipes import RECIPES, check_recipe, widths_of
from fractrain_fx.config.unused import check_used
from fractrain_fx.errors import ConfigError, near

if TYPE_CHECKING:
    from fractrain_fx.config import FracConfig

__all__ = ["check_config", "check_stage", "check_words"]


def check_words(config: FracConfig) -> None:
    """Raise a ``ConfigError`` for a word that a field does not know."""
    for name, kind in CHOICES.items():
        value, known = getattr(config, name), get_args(kind)
        if value not in known and not (name == "schedule" and value is None):
            raise ConfigError(f"{name}={value!r} is unknown: write one of {', '.join(known)}.{near(str(value), known)}")


def check_config(config: FracConfig) -> None:
    """Raise a ``ConfigError`` for fields out of range or that do not fit together."""
    check_used(config)
    _check_options(config)
    _check_rounding(config)
    _check_execution(config)
    if config.batch_axis < 0:
        raise ConfigError(f"batch_axis={config.batch_axis} must be at least 0: count dimensions from the first")
    if config.compared_calls < 0:
        raise ConfigError(f"compared_calls={config.compared_calls} must be at least 0, which compares no call")
    if config.recordings < 1:
        raise ConfigError(f"recordings={config.recordings} must be at least 1: a model is recorded once")
    _check_gradient_grid(config)
    check_recipe(config)
    _check_per_product(config)
    _check_steering(config)
    _check_gate_gradient(config)
    for name, low, high in (("epsilon", 0, None), ("alpha", 0, 1), ("keep", 0, 1)):
        value = getattr(config, name)
        if not (value >= low and (high is None or value <= high)):
            raise ConfigError(f"{name}={value} must lie in {low}..{'' if high is None else high}")
    if not (2 <= config.weight_bits <= 16 or config.weight_bits == FLOAT_BITS):
        raise ConfigError(f"weight_bits={config.weight_bits} must be 2 to 16, or 32 for float")
    check_clock(config)
    for name in ("epochs", "cycles"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")


def check_stage(config: FracConfig, precision: Precision) -> None:
    """Raise a ``ConfigError`` for a precision that the scheduled ops of a model cannot have."""
    if not config.scheduled:
        way_out = ". set_target(...) moves what its gates cannot choose for" if config.schedules_rest else ""
        raise ConfigError(
            f"method {config.method!r} has no stage precision to set: 'static' and 'pfq' have one{way_out}"
        )
    if precision.skips:
        raise ConfigError(f"{precision} computes nothing, and only gates can skip: write 2 bits or more")
    if config.format in BLOCK_FORMATS and (lacks := widths_of(config.format, precision)) is not None:
        raise ConfigError(lacks)
    if config.torchao is not None and precision != TORCHAO_PRECISION:
        raise ConfigError(
            f"execution={config.execution!r} computes at {TORCHAO_PRECISION}, not at {precision}: write "
            "execution='simulate'"
        )


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


def _check_rounding(config: FracConfig) -> None:
    formats = {"compiled": ("affine", *BLOCK_FORMATS), "triton": ("affine",)}.get(config.rounding)
    if formats is not None and (config.method in ("float", "slu") or config.format not in formats):
        which = "formats" if len(formats) > 1 else "format"
        raise ConfigError(
            f"rounding={config.rounding!r} changes nothing for method {config.method!r} with format {config.format!r}: "
            f"it changes how the {which} {', '.join(formats)} round{'' if len(formats) > 1 else 's'}. Write "
            "rounding='eager'"
        )


def _check_gradient_grid(config: FracConfig) -> None:
    if config.gradient_grid == "range":
        return
    if config.method in ("float", "slu") or config.format != "affine":
        raise ConfigError(
            f"gradient_grid={config.gradient_grid!r} changes nothing for method {config.method!r} with format "
            f"{config.format!r}: it shifts the levels of format 'affine'. Write gradient_grid='range'"
        )
    if config.execution != "simulate":
        raise ConfigError(
            f"gradient_grid={config.gradient_grid!r} goes with execution='simulate': execution={config.execution!r} "
            "multiplies gradients whose levels start at the lowest value"
        )


def _check_per_product(config: FracConfig) -> None:
    if (config.method == "float" and config.ranges == "tensor") or not config.per_product:
        return
    cause = f"format={config.format!r}" if config.ranges == "tensor" else f"ranges={config.ranges!r}"
    if config.ranges != "tensor" and (config.method in ("float", "slu") or config.format != "affine"):
        raise ConfigError(
            f"{cause} changes nothing for method {config.method!r} with format {config.format!r}: it gives format "
            "'affine' finer ranges. Write ranges='tensor'"
        )
    if config.rounding in ("compiled", "triton") and config.ranges != "tensor":
        raise ConfigError(
            f"rounding={config.rounding!r} does not go with {cause}, which rounds operands anew for each product: "
            "write rounding='eager'"
        )


def _check_steering(config: FracConfig) -> None:
    if config.saturate_targets and not (config.gated and config.targets is not None):
        raise ConfigError(
            f"saturate_targets changes nothing for method {config.method!r} with targets={config.targets}: it goes "
            "with targets that were set for gates"
        )
    if config.indicator == "total" and not (
        config.method == "fractrain" and config.schedule in (None, "auto", "two-stage")
    ):
        raise ConfigError(
            f"indicator='total' changes nothing for method {config.method!r} with schedule={config.schedule!r}: it "
            "moves 'fractrain' from stage to stage with schedule 'auto' or 'two-stage'. Write indicator='task'"
        )


def _check_gate_gradient(config: FracConfig) -> None:
    if config.gate.gradient == "straight-through":
        return
    if config.method == "slu":
        raise ConfigError(
            f"gate.gradient={config.gate.gradient!r} changes nothing for method 'slu', whose options round nothing: "
            "write gate.gradient='straight-through'"
        )
    if config.dispatches:
        raise ConfigError(
            f"gate.gradient={config.gate.gradient!r} does not go with execution='auto' where blocks leave out the "
            "samples that skip them, and so do not know the size of the batch: write skipping='masked' or "
            "execution='simulate'"
        )


def _check_execution(config: FracConfig) -> None:
    if config.skip_threshold is not None:
        if not config.dispatches:
            raise ConfigError(
                f"skip_threshold={config.skip_threshold} changes nothing with execution={config.execution!r} and "
                f"skipping={config.skipping!r}: it goes with 'auto' and 'dispatched'"
            )
        if not 0 <= config.skip_threshold <= 1:
            raise ConfigError(f"skip_threshold={config.skip_threshold} must lie in 0..1, the share of a batch")
    if config.kernels != "auto" and config.execution != "auto":
        raise ConfigError(
            f"kernels={config.kernels!r} changes nothing with execution={config.execution!r}, which multiplies "
            "rounded values in float: it goes with 'auto'"
        )
    if config.kernels == "int8" and not config.may_use_codes:
        raise ConfigError(
            f"kernels='int8' changes nothing for method {config.method!r} with format {config.format!r} at these "
            f"precisions: it goes with format 'affine' and ranges='tensor' at {CODE_BITS} forward bits or fewer"
        )
    if config.execution == "simulate":
        return
    if config.torchao is not None:
        _check_torchao(config)
        return
    if not (config.dispatches or config.may_use_codes):
        raise ConfigError(
            f"execution='auto' changes nothing for method {config.method!r} with these options: it leaves out "
            "samples that skip a block (gated methods with the option FW-0/BW-0), and multiplies on int8 what format "
            f"'affine' with ranges='tensor' rounds to {CODE_BITS} bits or fewer. Write execution='simulate'"
        )


def _check_torchao(config: FracConfig) -> None:
    way_out = f"write method='static' with precision='{TORCHAO_PRECISION}', or execution='simulate'"
    if config.method != "static" or config.precision != TORCHAO_PRECISION:
        given = f"method {config.method!r}" + (f" at {config.precision}" if config.method == "static" else "")
        raise ConfigError(
            f"execution={config.execution!r} always computes linear layers at 8 bits, which does not fit "
            f"{given}: {way_out}"
        )
    formats = TORCHAO_FORMATS[config.execution]
    if config.format not in formats:
        fitting = [kind for kind, known in TORCHAO_FORMATS.items() if config.format in known]
        others = f"write execution={fitting[0]!r}" if fitting else "torchao trains in none that fits"
        raise ConfigError(
            f"execution={config.execution!r} computes linear layers in torchao's number format, not in format "
            f"{config.format!r}: write format={' or '.join(map(repr, formats))}, or execution='simulate' ({others})"
        )
    recipe = formats[config.format]
    if recipe is not None and config.product_recipe != RECIPES[recipe]:
        raise ConfigError(
            f"execution={config.execution!r} follows recipe {recipe!r}, not recipe={config.recipe!r}: write "
            f"recipe={recipe!r}, or execution='simulate'"
        )
    if config.ranges != "tensor":
        raise ConfigError(
            f"execution={config.execution!r} has torchao's own ranges, not ranges={config.ranges!r}: write "
            "ranges='tensor', or execution='simulate'"
        )
