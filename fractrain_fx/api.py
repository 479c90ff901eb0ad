"""The main functions: ``fractrainify`` rewrites a model, ``plan`` shows what that would do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.fx.passes.infra.pass_base import PassBase

from fractrain_fx.capture.inputs.wrappers import unwrapped
from fractrain_fx.capture.source import warn
from fractrain_fx.config import FracConfig
from fractrain_fx.errors import ConfigError, InputError
from fractrain_fx.hardware.catalogue import find_machine
from fractrain_fx.hardware.machine import Machine
from fractrain_fx.memory import return_freed_memory
from fractrain_fx.model import FracModel
from fractrain_fx.native.choice import tell_rounding
from fractrain_fx.passes import analysis_passes
from fractrain_fx.passes.analyse.sequence_first import samples_in_sequence, sequence_first_words
from fractrain_fx.rewriting import record_model, rewrite
from fractrain_fx.summary import Summary, summarize

__all__ = ["fractrainify", "plan"]


def fractrainify(
    model: nn.Module,
    *,
    config: FracConfig | None = None,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    passes: Sequence[PassBase] | None = None,
    check: bool = True,
) -> FracModel:
    """Record a model and rewrite it for training with fractional precision.

    The model itself is not changed; the result shares its modules and parameters.

    Args:
        model: any ``nn.Module``. DDP, DataParallel, ``torch.compile`` and accelerate's mixed precision are taken off
            (with a warning; wrap the result instead), and ``restore()`` gives the inner model. Adapters of PEFT stay,
            and weights that they leave frozen cost no gradient.
        config: method, precisions and gates; by default FracTrain with the settings that trained best.
        example_inputs: positional inputs of one small batch; found automatically for timm, torchvision and Hugging
            Face models (with labels if the model computes a loss). A call with other arguments is recorded anew.
        example_kwargs: keyword inputs of that batch.
        passes: the chain of passes to run instead of ``default_passes(config)``.
        check: compare the recorded graph with the model, in training and evaluation.

    Raises:
        ConfigError: ``config`` is not a ``FracConfig``, or the model was rewritten already.
        InputError: an argument has the wrong type, or no example inputs were given and none can be found, or the model
            rejects them.
        CaptureError: the model could not be recorded as a graph that equals it.
        ModelError: the model has nothing to quantize, or nothing to gate.
        RuleError: a pin matches no contraction.
        TargetError: the gates cannot reach a cost target.
        PassError: the graph lacks something that one of ``passes`` requires.
    """
    config = _checked(model, config, example_inputs, example_kwargs)
    model = unwrapped(model)
    recording = record_model(model, config, example_inputs, example_kwargs, check=check)
    rewritten = rewrite(model, recording, config, passes)
    if misplaced := samples_in_sequence(recording.train):
        warn(f"{type(model).__name__}: {sequence_first_words(misplaced)}")
    tell_rounding(rewritten.rounding)
    frac_model = FracModel(rewritten)
    frac_model.checkpoint_as_before()
    frac_model._state.measure_examples(frac_model)
    return_freed_memory()
    return frac_model


def plan(
    model: nn.Module,
    *,
    config: FracConfig | None = None,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    machine: Machine | str | None = None,
    batch: int = 128,
) -> Summary:
    """The table that ``summarize`` gives for a rewritten model, without rewriting it.

    Args:
        model: any ``nn.Module``.
        config: method, precisions and gates.
        example_inputs: positional inputs of one small batch.
        example_kwargs: keyword inputs of that batch.
        machine: a machine, or its name such as ``"h200"``, on which to compute the time and energy of a training step.
        batch: samples of that step.

    Raises:
        FracTrainError: the errors of ``fractrainify``, or there is no machine of that name.
    """
    config = _checked(model, config, example_inputs, example_kwargs)
    machine = None if machine is None else find_machine(machine)  # a mistake is named before anything is recorded
    model = unwrapped(model)
    recording = record_model(model, config, example_inputs, example_kwargs)
    planned = FracModel(rewrite(model, recording, config, analysis_passes(config)))
    return summarize(planned, machine=machine, batch=batch)


def _checked(model: Any, config: Any, args: Any, kwargs: Any) -> FracConfig:
    """The configuration, after the kinds of all arguments were looked at.

    Raises:
        InputError: the model is no module, or the example inputs are not a list or not a mapping.
        ConfigError: the configuration is something else.
    """
    if not isinstance(model, nn.Module):
        if isinstance(model, type) and issubclass(model, nn.Module):
            raise InputError(f"{model.__name__} is a class: pass a model, like {model.__name__}()")
        raise InputError(f"a model must be a torch.nn.Module, not {type(model).__name__}")
    if isinstance(args, torch.Tensor) or not isinstance(args, (Sequence, NoneType)) or isinstance(args, str):
        raise InputError(
            f"example_inputs is a {type(args).__name__}, and must be a tuple of the model's positional arguments: "
            "write example_inputs=(x,)"
        )
    if not isinstance(kwargs, (Mapping, NoneType)):
        raise InputError(
            f"example_kwargs is a {type(kwargs).__name__}, and must be a dictionary of the model's keyword arguments: "
            "write example_kwargs={'x': x}"
        )
    if not isinstance(config, (FracConfig, NoneType)):
        way_out = f"FracConfig(method={config!r})" if isinstance(config, str) else "FracConfig(...)"
        raise ConfigError(f"config is a {type(config).__name__}, and must be a FracConfig: write config={way_out}")
    return config or FracConfig()
