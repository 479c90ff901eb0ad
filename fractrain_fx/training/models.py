"""Models by name: ``timm:resnet18``, ``hf:gpt2``, ``zoo:resnet38`` or ``path.py:function``; never pretrained."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fractrain_fx.errors import ModelError, near
from fractrain_fx.training.data import DataSet, stand_in
from fractrain_fx.training.model_file import MODEL_FORMS, function_of, own_code

__all__ = ["BuiltModel", "build_model", "zoo_models"]

_CLASSES = 10  # or tokens, if neither the data nor the model gives a number
# A transformer small enough for a laptop, in field names that Hugging Face's configurations share.
_SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 256,
    "patch_size": 4,
    "num_channels": 3,
}
# The same of models that have an encoder and a decoder.
_SMALL_PAIR = {f"{side}_layers": 2 for side in ("encoder", "decoder")}
_SMALL_PAIR |= {f"{side}_ffn_dim": 256 for side in ("encoder", "decoder")}
_SMALL_PAIR |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
# The classes of transformers that are looked through, in this order, for a type that is only looked at.
_HEADS = (
    *("CausalLM", "ImageClassification", "ObjectDetection", "SemanticSegmentation", "AudioClassification"),
    *("Seq2SeqLM", "SequenceClassification"),
)


@dataclass(frozen=True)
class BuiltModel:
    """A model with its data.

    Attributes:
        model: has random weights.
        data: the data set, with images enlarged to the model's size; random samples if none was given.
        input_name: keyword of the model's input; ``None``: its first positional argument.
        made: inputs to record the model with, if not those of the data.
    """

    model: nn.Module
    data: DataSet
    input_name: str | None = None
    made: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def examples(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword inputs to record the model with."""
        if self.made is not None:
            return self.made
        example = self.data.example()
        return ((example,), {}) if self.input_name is None else ((), {self.input_name: example})


def build_model(name: str, data: DataSet | None = None, *, image_size: int | None = None) -> BuiltModel:
    """Build the model with a name, with the outputs that ``data`` needs.

    Args:
        name: ``timm:`` and a timm model, ``hf:`` and a Hugging Face model type (a small one is built from its
            configuration), ``zoo:`` and a model of this package, or a Python file and a function in it that returns
            a module; the function gets those of ``num_classes``, ``vocab_size`` and ``image_size`` that it takes.
        data: decides the task, the number of classes or tokens, and the length of sequences. Without it the model
            keeps its own numbers, if it has any, and Hugging Face types of other tasks (``hf:detr``) can be built too.
        image_size: side of the images; by default the data set's (32, ImageNet: 224), or the model's if that is fixed
            or there is no ``data``.

    Raises:
        ModelError: the name is unknown (the message has near names), the model does not fit the task, or the function
            fails.
    """
    source, _, rest = name.rpartition(":")
    if source.endswith(".py"):
        path = Path(source)
        with own_code(path, name):
            return _called(function_of(path, rest), name, data, image_size)
    source, _, rest = name.partition(":")
    if source == "timm" and rest:
        return _from_timm(rest, data, image_size)
    if source == "hf" and rest:
        return _from_hugging_face(rest, data, image_size)
    if source == "zoo" and rest:
        return _from_zoo(rest, data, image_size)
    raise ModelError(f"model {name!r} does not say where it comes from: {MODEL_FORMS}, for example timm:resnet18")


def _from_timm(name: str, data: DataSet | None, image_size: int | None) -> BuiltModel:
    import timm

    if not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models())
    if data is not None and data.task != "classification":
        raise ModelError(
            f"timm:{name} is for classification, {data.name!r} is for {data.task}: choose another data set or model"
        )
    fixed = bool(timm.get_pretrained_cfg_value(name, "fixed_input_size"))
    changes: dict[str, Any] = {"img_size": image_size} if fixed and image_size else {}
    changes |= {} if data is None else {"num_classes": data.classes}
    try:
        model: Any = timm.create_model(name, pretrained=False, **changes)
    except TypeError as error:
        raise ModelError(f"timm:{name} does not take images of side {image_size}: leave out the image size") from error
    channels, side, _ = model.pretrained_cfg["input_size"]
    side = image_size or (side if fixed or data is None else data.side)
    return BuiltModel(model, (data or stand_in("classification", model.num_classes)).sized(channels, side))


def _from_hugging_face(name: str, data: DataSet | None, image_size: int | None) -> BuiltModel:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageClassification

    head = _head_of(name) if data is None else ""
    if head not in ("", "CausalLM", "ImageClassification"):
        if image_size is not None:
            raise ModelError(f"hf:{name} is built with its own image size here: leave out image_size={image_size}")
        return _looked_at(name, head)
    if data is None:
        data = stand_in("language" if head == "CausalLM" else "classification", _CLASSES)
    auto: Any = AutoModelForCausalLM if data.task == "language" else AutoModelForImageClassification
    fitting = sorted({config.model_type for config in auto._model_mapping})
    if name not in CONFIG_MAPPING:
        kinds = [kind for kind in CONFIG_MAPPING if re.match(rf"{re.escape(kind)}\b", name.rpartition("/")[2])]
        if kinds:
            kind = max(kinds, key=len)
            raise ModelError(
                f"hf:{name} names weights, and models are built here by type, small and with random weights: write "
                f"hf:{kind}, or give a file whose function loads {name} (FILE.py:FUNCTION)"
            )
        raise _unknown("hf", name, fitting)
    if name not in fitting:
        raise ModelError(
            f"hf:{name} has no model for {data.task}, which {data.name!r} needs; among those that do are "
            f"{', '.join(fitting[:8])}.{near(name, fitting)}"
        )
    side = image_size or data.side
    wanted: dict[str, Any] = dict(_SMALL)
    if data.task == "language":
        wanted |= {"vocab_size": data.classes, "max_position_embeddings": data.example().shape[1], "is_decoder": True}
    else:
        wanted |= {"image_size": side}
    # The default special tokens are those of the full vocabulary.
    wanted |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    changes = _changes(name, wanted) | {"num_labels": data.classes, "use_cache": False}
    config = CONFIG_MAPPING[name](**changes)
    config.architectures = []  # a type of several classes (deit) looks their names up here, also if it is None
    model = auto.from_config(config)
    if data.task == "classification":
        data = data.sized(getattr(config, "num_channels", 3), side)
    return BuiltModel(model, data, model.main_input_name)


def _head_of(name: str) -> str:
    """The task of the first of transformers' classes that has a model type; empty if none has."""
    import transformers

    for head in _HEADS:
        auto: Any = getattr(transformers, f"AutoModelFor{head}")
        if name in (config.model_type for config in auto._model_mapping):
            return head
    return ""


def _looked_at(name: str, head: str) -> BuiltModel:
    """A small model for a task without a data set here, with example inputs: for tables and drawings."""
    import transformers
    from transformers import CONFIG_MAPPING

    from fractrain_fx.capture.inputs.examples import example_inputs

    wanted = {key: value for key, value in (_SMALL | _SMALL_PAIR).items() if key != "patch_size"}
    config = CONFIG_MAPPING[name](**_changes(name, wanted))
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    return BuiltModel(model, stand_in("classification", _CLASSES), model.main_input_name, example_inputs(model))


def _changes(name: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The wanted fields that a type's configuration has; those with a value only if it is a whole number there too."""
    from transformers import CONFIG_MAPPING

    default = CONFIG_MAPPING[name]()
    known = default.to_dict().keys() | default.attribute_map.keys()
    return {
        key: value
        for key, value in wanted.items()
        if key in known and (value is None or isinstance(getattr(default, key), int))
    }


def zoo_models() -> list[str]:
    """Names of the models in this package."""
    from fractrain_fx.zoo import models

    return [name for name in models.__all__ if inspect.isfunction(getattr(models, name))]


def _from_zoo(name: str, data: DataSet | None, image_size: int | None) -> BuiltModel:
    from fractrain_fx.zoo import models

    if name not in zoo_models():
        raise _unknown("zoo", name, zoo_models())
    return _called(getattr(models, name), f"zoo:{name}", data, image_size)


def _called(build: Any, name: str, data: DataSet | None, image_size: int | None) -> BuiltModel:
    """Call a user's or the zoo's function with those offered arguments that it takes."""
    parameters = inspect.signature(build).parameters
    if data is None:
        data = stand_in("language" if "vocab_size" in parameters else "classification", _CLASSES)
    side = image_size or data.side
    offered = {"image_size": side, "num_classes" if data.task == "classification" else "vocab_size": data.classes}
    _fits(parameters, name, data)
    lacking = [arg.name for arg in parameters.values() if arg.name not in offered and _needs_value(arg)]
    if lacking:
        raise ModelError(
            f"{name} needs {', '.join(lacking)}, which it is not given: write defaults for all arguments but "
            f"{' and '.join(offered)}"
        )
    model = build(**{key: value for key, value in offered.items() if key in parameters})
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name} returned {type(model).__name__}, not a torch.nn.Module")
    if data.task == "classification":
        data = data.sized(3, side)
    return BuiltModel(model, data, getattr(model, "main_input_name", None))


def _needs_value(parameter: inspect.Parameter) -> bool:
    several = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and not several


def _fits(parameters: Iterable[str], name: str, data: DataSet) -> None:
    """Refuse a function that only takes the argument of the other task."""
    mine, other = ("num_classes", "vocab_size") if data.task == "classification" else ("vocab_size", "num_classes")
    if other in parameters and mine not in parameters:
        raise ModelError(
            f"{name} takes {other}, so it does not fit {data.name!r} ({data.task}): choose another data set or model"
        )


def _unknown(source: str, name: str, known: Iterable[str]) -> ModelError:
    known = sorted({f"{source}:{model}" for model in known})
    return ModelError(f"model '{source}:{name}' is unknown: {MODEL_FORMS}.{near(f'{source}:{name}', known)}")
