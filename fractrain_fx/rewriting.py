"""Record a model, and run a chain of passes over the recording."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx.passes.infra.pass_base import PassBase

from fractrain_fx.capture import RecordedModule, Recording, record
from fractrain_fx.capture.circumstances.notices import forget_notices
from fractrain_fx.capture.inputs.examples import example_inputs as find_examples
from fractrain_fx.capture.source import warn
from fractrain_fx.capture.state import Generators
from fractrain_fx.capture.trees import tensors_in
from fractrain_fx.config import FracConfig
from fractrain_fx.config.targets import CostReach, resolve_targets, scheduled_precision
from fractrain_fx.errors import CaptureError, ConfigError, FracTrainError, InputError, ModelError, PassError
from fractrain_fx.native.choice import RoundingChoice, choose_rounding
from fractrain_fx.nn.bits import set_stage
from fractrain_fx.nn.frozen_weight import FrozenWeight
from fractrain_fx.passes import FIXED_BATCH, KNOWN, TRAINED, default_passes, reach_of
from fractrain_fx.passes.graph import NAMESPACE
from fractrain_fx.passes.graph.run import failed_module, run_passes

__all__ = ["OWN", "Rewritten", "record_model", "rewrite", "rewrite_graphs"]

OWN = "_fractrain"
"""The attribute in which a rewritten model keeps its own state; its other attributes are the original's."""


@dataclass(frozen=True)
class Rewritten:
    """A recording after a chain of passes: everything that a :class:`fractrain_fx.FracModel` is made from.

    Attributes:
        original: the model that was passed to ``fractrainify``.
        recording: the rewritten graphs, and the inputs they were recorded on.
        config: the configuration they were rewritten with, in which ``rounding`` is chosen.
        rounding: how it was chosen.
        chain: the passes that rewrote them, if not the default ones.
        targets: target cp of each stage in per cent, if there are gates.
        reach: the costs that the model can have, if there are gates.
    """

    original: nn.Module
    recording: Recording
    config: FracConfig
    rounding: RoundingChoice
    chain: tuple[PassBase, ...] | None = None
    targets: tuple[float, ...] = ()
    reach: CostReach | None = None


def record_model(
    model: nn.Module,
    config: FracConfig,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    check: bool = True,
) -> Recording:
    """Record a model that was not rewritten yet, on the given inputs or on inputs that can be found for it.

    Raises:
        ConfigError: the model, or a part of it, was already rewritten, or no input has the dimension ``batch_axis``.
        InputError: no example inputs were given and none can be found, or the model rejects them.
        CaptureError: the model could not be recorded as a graph that equals it.
    """
    _refuse_rewritten(model)
    forget_notices(model)
    if example_inputs is None and example_kwargs is None:
        args, kwargs = _found_examples(model)
    else:
        args, kwargs = tuple(example_inputs or ()), dict(example_kwargs or {})
    if config.run.batch_axis and all(x.ndim <= config.run.batch_axis for x in tensors_in((args, kwargs))):
        raise ConfigError(
            f"run.batch_axis={config.run.batch_axis} names a dimension that no example input has: count dimensions "
            "from 0"
        )
    recording = record(model, args, kwargs, batch_axis=config.run.batch_axis, check=check)
    for note in recording.python.notes:
        warn(f"{type(model).__name__}: {note}")
    return recording


def rewrite(
    model: nn.Module, recording: Recording, config: FracConfig, passes: Sequence[PassBase] | None = None
) -> Rewritten:
    """Run a chain, by default ``default_passes(config)``, over the graph of each mode.

    ``backend="auto"`` becomes ``plain``, ``cpu`` or ``cuda``, by the device of the model's parameters.

    Raises:
        ConfigError: the environment variable that fixes ``backend="auto"`` is wrong.
        ModelError: the model has nothing to quantize, or nothing to gate.
        TargetError: the gates cannot reach a cost target.
        FracTrainError: a pass raised it.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    rounding = choose_rounding(config, device)
    if config.run.backend == "auto":
        config = config.replace(**{"run.backend": rounding.used})
    chain = None if passes is None else tuple(passes)
    rewrite_graphs(model, recording, default_passes(config) if chain is None else chain)
    if not config.gated:
        return Rewritten(model, recording, config, rounding, chain)
    reach = reach_of(recording.train, config)
    targets = resolve_targets(config, reach)
    set_stage(recording.train, scheduled_precision(config, targets[0]))
    return Rewritten(model, recording, config, rounding, chain, targets, reach)


def rewrite_graphs(
    model: nn.Module, recording: Recording, passes: Sequence[PassBase], first: Recording | None = None
) -> None:
    """Run a chain over the graph of each mode; inserted modules go to the device of the model's parameters.

    Args:
        model: the model.
        recording: its graphs.
        passes: the chain.
        first: the recording whose names ops take, if this is not the first one.

    Raises:
        ModelError: the model has nothing to quantize or to gate.
        FracTrainError: a pass raised it.
    """
    generators = Generators(model)
    states = generators.keep()  # passes run the graph, which may draw from them
    try:
        known = [] if first is None else [*first.graphs]
        for graph_module in recording.graphs:
            graph_module.meta[KNOWN] = known
            if graph_module is not recording.train:
                graph_module.meta[TRAINED] = recording.train
            _run(graph_module, recording, passes)
            known = [graph_module, *known]
            del graph_module.meta[KNOWN]
        recording.eval.meta.pop(TRAINED, None)
    except ModelError as error:
        if not recording.leaves:
            raise
        message = f"{error}. Modules kept as one node each, inside which no op can be chosen: {_told(recording)}"
        raise ModelError(message) from None
    finally:
        generators.put_back(states)
    place = next((p.device for p in model.parameters()), None)
    inserted = recording.train._modules.get(NAMESPACE)
    if inserted is not None and place is not None and place.type != "meta":
        inserted.to(place)


def _found_examples(model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs with labels, if the model computes a loss from labels of a known kind."""
    with contextlib.suppress(InputError):
        return find_examples(model, labels=True)
    return find_examples(model)


def _refuse_rewritten(model: nn.Module) -> None:
    if OWN in model.__dict__:
        raise ConfigError("this model was rewritten already: call fractrainify on model.restore() with another config")
    for path, module in model.named_modules():
        if OWN in module.__dict__:
            raise ConfigError(
                f"{path!r} inside this {type(model).__name__} was rewritten already: put {path}.restore() in its place "
                "and rewrite the whole, or train the whole with Engine(that part)"
            )
    if any(isinstance(value, FrozenWeight) for module in model.modules() for value in module.__dict__.values()):
        raise ConfigError(
            "frozen weights of this model are codes of another rewritten model: call restore() there, which puts "
            "float values back"
        )
    if NAMESPACE in model._modules:
        raise ConfigError(
            f"this {type(model).__name__} has a part named {NAMESPACE!r}, the name for inserted modules of a "
            "rewritten model: if it was rewritten already (as trainer.model), call fractrainify on model.restore(); "
            "otherwise rename that part"
        )


def _told(recording: Recording) -> str:
    """The modules that were kept as one node, the largest first, with reasons."""
    held = {path: sum(p.numel() for p in recording.train.get_submodule(path).parameters()) for path in recording.leaves}
    largest = sorted(held, key=lambda path: -held[path])[:3]
    rest = len(held) - len(largest)
    words = "; ".join(f"{path!r} ({recording.leaves[path]})" for path in largest)
    return words + (f"; and {rest} more" if rest else "")


def _run(graph_module: RecordedModule, recording: Recording, passes: Sequence[PassBase]) -> None:
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders, recording.inputs, strict=True):
        node.meta["example"] = value
    graph_module.meta[FIXED_BATCH] = recording.fixed_batch
    try:
        run_passes(graph_module, passes)
    except FracTrainError:
        raise
    except Exception as error:
        cause = error.__cause__
        if cause is None:
            raise
        part = failed_module(cause)
        if part is not None and part in recording.leaves:
            kind = type(graph_module.get_submodule(part)).__name__
            words = str(cause).partition("\n\nWhile executing")[0]
            raise CaptureError(
                f"module {part!r} ({kind}), which stays one node, fails when it runs again or with another number of "
                f"samples: {type(cause).__name__}: {words}. It stays one node because {recording.leaves[part]}. The "
                "rewriting runs the model like that to learn its shapes, and a last batch may be smaller: let that "
                "module begin anew when the number of samples changes, or keep one value for all samples; or do this "
                "outside the model, or switch it off in its config or the example inputs"
            ) from cause
        parts = f" Parts that stay one node may be the cause: {_told(recording)}." if recording.leaves else ""
        raise PassError(
            f"{error}: {type(cause).__name__}: {cause}. The recorded graph runs on the example inputs, but a pass "
            f"also runs it with more samples and with other values.{parts} Try example inputs of several samples that "
            "differ; if that does not help, please report the model"
        ) from cause
    for node in placeholders:
        node.meta.pop("example", None)
