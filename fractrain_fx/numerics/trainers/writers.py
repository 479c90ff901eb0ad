"""The files of trainers, each in the form that the trainer reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from glob import escape
from typing import TYPE_CHECKING, Literal

import yaml

from fractrain_fx.errors import ConfigError

if TYPE_CHECKING:
    from fractrain_fx.numerics.trainers.layers import LayerPrecisions

__all__ = ["Word", "megatron", "torchao", "torchtitan", "transformer_engine"]

Word = Literal["fp4", "fp8", "bf16"]


def torchtitan(found: LayerPrecisions) -> str:
    """A Python file of torchtitan 0.3: the converter to float8, and the layers' names for its other converters."""
    high, low = found.having("bf16"), found.having("fp8")
    for part, names, others in (("FILTER_FQNS", high, low), ("FQNS", low, high)):
        for name in names:
            if (other := next((longer for longer in others if name in longer), None)) is not None:
                raise ConfigError(
                    f"torchtitan matches a name inside others, so {name!r} in {part} would take {other!r} along: "
                    "rename one of them, or give another budget"
                )
    return (
        _heading(found, "Pass QUANTIZATION to model_registry(..., quantization=QUANTIZATION).")
        + f"""
from torchtitan.components.quantization import Float8LinearConverter

# Stay in bf16: filter_fqns of Float8LinearConverter.
FILTER_FQNS = {_listed(high)}

# In low precision: fqns of MXFP8LinearConverter, which needs no FILTER_FQNS.
FQNS = {_listed(low)}

QUANTIZATION = [
    Float8LinearConverter.Config(recipe_name="rowwise", filter_fqns=FILTER_FQNS, model_compile_enabled=True)
]
"""
    )


def torchao(found: LayerPrecisions) -> str:
    """A Python file with a ``module_filter_fn`` of torchao."""
    return (
        _heading(
            found, "convert_to_float8_training(model, module_filter_fn=module_filter_fn), or quantize_'s filter_fn."
        )
        + f"""
CONVERTED = frozenset({_listed(found.having("fp8"))})


def module_filter_fn(module, fqn):
    return fqn in CONVERTED
"""
    )


def transformer_engine(found: LayerPrecisions) -> str:
    """A Python file that gives each layer of TransformerEngine 2 its own autocast region."""
    layers = "".join(f"    {name!r}: {word!r},\n" for name, word in found.layers.items())
    return (
        _heading(found, "Call use_precisions(model) once, before training.")
        + f"""
import functools

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import MXFP8BlockScaling, NVFP4BlockScaling

RECIPES = {{"fp8": MXFP8BlockScaling(), "fp4": NVFP4BlockScaling(), "bf16": None}}
PRECISIONS = {{
{layers}}}


def use_precisions(model):
    modules = dict(model.named_modules())
    if missing := PRECISIONS.keys() - modules.keys():
        raise KeyError(f"the model has no layers {{sorted(missing)}}")
    for name, precision in PRECISIONS.items():
        modules[name].forward = _inside(modules[name].forward, RECIPES[precision])


def _inside(forward, recipe):
    @functools.wraps(forward)
    def run(*args, **kwargs):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            return forward(*args, **kwargs)

    return run
"""
    )


def megatron(found: LayerPrecisions) -> str:
    """The YAML of Megatron-core's ``--te-precision-config-file``: recipes, and globs that choose one for each layer."""
    recipes = {"fp4": {"fp4_quantization_recipe": "nvfp4"}, "fp8": {"fp8_quantization_recipe": "mxfp8"}, "bf16": {}}
    configs = {
        word: {
            "transformer_engine_config_type": "TEQuantizationParams",
            "training_recipe": {**recipe, "override_quantized_autocast": True, "override_nonquantized_autocast": True},
        }
        for word, recipe in recipes.items()
        if word == "bf16" or found.having(word)  # type: ignore[arg-type]
    }
    # The first glob that matches decides, so that a name comes before others that it ends with.
    names = sorted(found.having("fp4", "fp8"), key=len, reverse=True)
    globs = {name: (f"*{escape(name)}", found.layers[name]) for name in names}
    for name, word in found.layers.items():
        taken = next((by for by, (glob, _) in globs.items() if fnmatchcase(name, glob)), None)
        if (globs[taken][1] if taken else "bf16") != word:
            raise ConfigError(
                f"Megatron's glob for {taken!r} would also take {name!r}, which ends with that name: rename one of "
                "them, or give another budget"
            )
    matchers = {
        name: {"type": "glob", "enabled": True, "pattern": glob, "config": word} for name, (glob, word) in globs.items()
    }
    matchers["every other layer"] = {"type": "glob", "enabled": True, "pattern": "*", "config": "bf16"}
    heading = "\n".join(f"# {line}" for line in _lines(found, "For --te-precision-config-file of Megatron-core 0.16."))
    return heading + "\n" + yaml.safe_dump({"configs": configs, "matchers": matchers}, sort_keys=False, width=120)


def _heading(layers: LayerPrecisions, usage: str) -> str:
    return '"""' + "\n".join(_lines(layers, usage)) + '\n"""\n'


def _lines(layers: LayerPrecisions, usage: str) -> Iterable[str]:
    yield usage
    yield ""
    yield f"Layers whose low precision harms the loss most for its savings stay in bf16. {layers}."
    yield f"Measured in format {', '.join(layers.formats)}. Ops that are not listed, such as attention's, are in bf16."
    for reason in dict.fromkeys(layers.fixed.values()):
        names = [name for name, why in layers.fixed.items() if why == reason]
        yield f"In bf16 whatever the budget is ({reason}): {', '.join(names)}."


def _listed(names: Sequence[str]) -> str:
    return "[]" if not names else "[\n" + "".join(f"    {name!r},\n" for name in names) + "]"
