"""The front door: ``fractrainify`` rewrites a model, ``plan`` says what that would do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.fx.passes.infra.pass_base import PassBase

from fractrain_fx.capture import Recording, record
from fractrain_fx.capture.inputs.examples import example_inputs as find_examples
from fractrain_fx.capture.inputs.wrappers import unwrapped
from fractrain_fx.config import FracConfig
from fractrain_fx.config.targets import resolve_targets
from fractrain_fx.errors import ConfigError
from fractrain_fx.model import FracModel
from fractrain_fx.passes import analysis_passes, default_passes, reachable
from fractrain_fx.passes.graph.edit import NAMESPACE
from fractrain_fx.rewriting import rewrite_graphs
from fractrain_fx.summary import Summary, summarize
from fractrain_fx.tied import forget_notices
from fractrain_fx.tied.telling import warn

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
            and what they leave frozen costs no gradient of its weights.
        config: method, precisions and gates; FracTrain with the paper's values by default.
        example_inputs: positional inputs of one small batch; found by themselves for timm, torchvision and Hugging
            Face models. What is passed here (and what is not) fixes which arguments later calls may pass.
        example_kwargs: keyword inputs of that batch.
        passes: the chain to run instead of ``default_passes(config)``.
        check: compare the recorded graph with the model, in training and evaluation.

    Raises:
        InputError: no example inputs were given and none can be found, or the model rejects them.
        CaptureError: the model could not be recorded as a graph that equals it.
        ModelError: nothing to quantize, or nothing to gate.
        RuleError: a pin matches nothing.
        TargetError: a cost target that the gates cannot reach.
    """
    config, model = config or FracConfig(), unwrapped(model)
    recording = _record(model, config, example_inputs, example_kwargs, check)
    chain = default_passes(config) if passes is None else list(passes)
    return rewrite(model, recording, chain, config, own=passes is not None)


def plan(
    model: nn.Module,
    *,
    config: FracConfig | None = None,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
) -> Summary:
    """What ``fractrainify`` would do, as the table that ``summarize`` gives; nothing is rewritten.

    Raises:
        FracTrainError: as ``fractrainify``.
    """
    config, model = config or FracConfig(), unwrapped(model)
    recording = _record(model, config, example_inputs, example_kwargs, check=True)
    return summarize(rewrite(model, recording, analysis_passes(config), config))


def _record(
    model: nn.Module,
    config: FracConfig,
    example_inputs: Sequence[Any] | None,
    example_kwargs: Mapping[str, Any] | None,
    check: bool,
) -> Recording:
    _refuse_rewritten(model)
    forget_notices(model)
    if example_inputs is None and example_kwargs is None:
        args, kwargs = find_examples(model)
    else:
        args, kwargs = tuple(example_inputs or ()), dict(example_kwargs or {})
    recording = record(model, args, kwargs, batch_axis=config.batch_axis, check=check)
    for note in recording.python.notes:
        warn(f"{type(model).__name__}: {note}")
    return recording


def _refuse_rewritten(model: nn.Module) -> None:
    if isinstance(model, FracModel):
        raise ConfigError("this model was rewritten already: call fractrainify on model.restore() with another config")
    for path, module in model.named_modules():
        if isinstance(module, FracModel):
            raise ConfigError(
                f"{path!r} inside this {type(model).__name__} was rewritten already: put {path}.restore() in its place "
                "and rewrite the whole, or train the whole with Engine(that part)"
            )
    if NAMESPACE in model._modules:
        raise ConfigError(
            f"this {type(model).__name__} has a part named {NAMESPACE!r}, under which a rewritten model keeps what was "
            "inserted: if it was rewritten already (as trainer.model), call fractrainify on what restore() gives; "
            "otherwise rename that part"
        )


def rewrite(
    model: nn.Module, recording: Recording, passes: Sequence[PassBase], config: FracConfig, own: bool = False
) -> FracModel:
    """Run a chain over the graph of each mode, and put the model's face on the result.

    ``own``: the chain is not the one that the configuration gives.
    """
    rewrite_graphs(model, recording, passes)
    rewritten = FracModel(model, recording, config, passes=passes if own else None)
    if config.gated:
        low, high = reachable(recording.train, config)
        rewritten._inside.reachable = low, high
        rewritten._inside.targets = resolve_targets(config, low, high)
    return rewritten
