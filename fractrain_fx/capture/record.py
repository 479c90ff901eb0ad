"""Record a model on example inputs, and check that the graph equals it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph

from fractrain_fx.capture.checking.check import Batching, rejection, trials_of
from fractrain_fx.capture.checking.guard_check import Guards
from fractrain_fx.capture.checking.verify import Attempt, Elsewhere, check_repeated, check_trial, tie_batch
from fractrain_fx.capture.inputs.caches import fill_caches
from fractrain_fx.capture.inputs.call import CallSpec, Example, describe_call
from fractrain_fx.capture.inputs.data import has_data, needs_data, without_data
from fractrain_fx.capture.module import RecordedModule
from fractrain_fx.capture.outside.outside import Outside, PythonState
from fractrain_fx.capture.recording.arguments import argument
from fractrain_fx.capture.recording.cleanup import join_whole_lists, remove_dead
from fractrain_fx.capture.recording.constants import Additions
from fractrain_fx.capture.recording.leaves import opaque_reason
from fractrain_fx.capture.recording.merge import merge_modes
from fractrain_fx.capture.recording.patch import Calls, recording
from fractrain_fx.capture.recording.recorder import Recorder, Return
from fractrain_fx.capture.recording.results import map_results
from fractrain_fx.capture.recording.whole import KeepWholeError, Whole
from fractrain_fx.capture.recording.writer import UnrepresentableError
from fractrain_fx.capture.sizes.guards import Guard
from fractrain_fx.capture.state import Snapshot
from fractrain_fx.errors import CaptureError

__all__ = ["Recording", "record"]


@dataclass(frozen=True)
class Recording:
    """A model as a graph.

    Attributes:
        train: the graph in train mode; its output is the model's own output structure.
        eval: the graph in eval mode: the same object if one graph serves both, else a graph that shares its children.
        call: the form of call that the graph takes.
        leaves: path and reason of each module that is kept as one node although it is not a leaf.
        args: positional example inputs.
        kwargs: keyword example inputs.
        batching: how inputs grow with samples; ``FIXED``: the graph only holds for the example's batch size.
        checked: whether the graph was compared with the model; tensors without data (meta) cannot be.
        guards: conditions on sizes for the graphs of training (``True``) and evaluation.
        python: attributes whose values decided what was recorded.
    """

    train: RecordedModule
    eval: RecordedModule
    call: CallSpec
    leaves: Mapping[str, str]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    batching: Batching
    checked: bool
    guards: Mapping[bool, Guards]
    python: PythonState

    @property
    def fixed_batch(self) -> bool:
        """Whether the graph only holds for the example's batch size."""
        return self.batching is Batching.FIXED

    def broken(self, values: tuple[Any, ...], model: nn.Module, training: bool) -> Guard | None:
        """The first guard of a mode's graph that does not hold for a call; ``None`` if the graph equals the model.

        Args:
            values: for the inputs of the graph.
            model: the model that was recorded.
            training: the mode.
        """
        return self.guards[training].broken(values, self.train if training else self.eval, model)

    @property
    def graphs(self) -> tuple[RecordedModule, ...]:
        """The graph that serves both modes, or the graphs of training and evaluation."""
        return (self.train,) if self.eval is self.train else (self.train, self.eval)


@dataclass(frozen=True)
class _Pass:
    """One recorded run."""

    graph: Graph
    returns: list[Return]
    guards: Guards
    python: PythonState


def record(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    batch_axis: int = 0,
    check: bool = True,
) -> Recording:
    """Record one real run of ``model`` in each mode as a graph on the model's own modules and parameters.

    The model is left as it was (buffers, gradients, mode flags and random generators), except for tables that it makes
    at its first call.

    A model on the meta device is recorded from shapes alone. Its example inputs are moved there too, and nothing is
    compared, because there are no values.

    Args:
        model: any module without an attribute ``frac``.
        args: positional example inputs.
        kwargs: keyword example inputs.
        batch_axis: dimension of the inputs that holds the samples, for the check at another batch size.
        check: compare the graph with the model (outputs, gradients, buffers).

    Raises:
        CaptureError: the model computes something that a graph cannot hold; names the module, the cause and a way out.
        InputError: the example inputs do not fit the model.
    """
    if hasattr(model, "frac"):
        raise CaptureError(
            f"{type(model).__name__} has an attribute 'frac', the name under which inserted modules go: rename it"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            f"{type(model).__name__} is a TorchScript module, whose calls are not seen: pass the Python module"
        )
    real = has_data(model)
    if not real:
        args, kwargs = without_data((tuple(args), kwargs or {}))
    example = describe_call(model, tuple(args), kwargs or {})
    closed = {path: reason for path, module in model.named_modules() if path and (reason := opaque_reason(module))}
    whole = Whole(dict(closed))
    snapshot = fill_caches(model, example) if real else Snapshot(model)
    with snapshot.preserved(), torch.enable_grad():
        trials, batching = trials_of(snapshot, example, batch_axis) if check and real else ([], Batching.ROWS)
        others = Elsewhere(snapshot, example, batch_axis, batching) if trials else None
        while True:
            try:
                attempt = _attempt(snapshot, example, whole)
                for trial in trials:
                    check_trial(snapshot, attempt, trial, batching)
                    check_repeated(snapshot, attempt, trial)
                if others is not None:
                    others.check(attempt)
                break
            except KeepWholeError as found:
                known = set(whole.callees), set(whole.refused)
                new = whole.add(found.obstacles, found.refused)
                if not new and known != (set(whole.callees), set(whole.refused)):
                    continue
                try:
                    whole.keep(model, new)
                except CaptureError:
                    if not found.compared or batching is Batching.FIXED:
                        raise
                    # The model's own code counts its samples, so the graph only holds for the number in the example.
                    whole = Whole(dict(closed))
                    trials, batching = trials_of(snapshot, example, batch_axis, grow=False)
                    others = Elsewhere(snapshot, example, batch_axis, batching)
        if batching is Batching.FIXED:
            tie_batch(model, attempt, example, batch_axis)
    mode = model.training
    recorded = Recording(
        train=attempt.train,
        eval=attempt.eval,
        call=example.spec,
        leaves=whole.modules,
        args=tuple(args),
        kwargs=dict(kwargs or {}),
        batching=batching,
        checked=bool(trials),
        guards=attempt.guards,
        python=attempt.python,
    )
    for graph in recorded.graphs:
        graph.__dict__["training"] = mode
        graph.get_submodule("frac").train(mode)
    return recorded


def _attempt(snapshot: Snapshot, example: Example, whole: Whole) -> Attempt:
    model, additions = snapshot.model, Additions()
    passes = {train: _run(snapshot, example, whole, additions, train) for train in (True, False)}
    graphs = passes[True].graph, passes[False].graph
    # Merge before removing dead nodes: an unused branch that draws random numbers would stay in training only.
    one = merge_modes(*graphs, additions)
    for graph in graphs:
        remove_dead(graph)
    one = one or merge_modes(*graphs, additions)
    modules = {**model._modules, "frac": additions.root}
    train = RecordedModule.over(model, modules, passes[True].graph)
    evaluation = train if one else RecordedModule.over(model, modules, passes[False].graph)
    for recorded in (train, evaluation):
        recorded.graph.lint()
    used = {str(n.target) for r in (train, evaluation) for n in r.graph.nodes if n.op == "get_attr"}
    guards = {mode: passes[mode].guards for mode in (True, False)}
    additions.drop_unused(used.union(*(each.constants for each in guards.values())))
    returns = {mode: passes[mode or one].returns for mode in (True, False)}
    python = PythonState.joined(each.python for each in passes.values())
    return Attempt(train, evaluation, returns, guards, python)


def _run(snapshot: Snapshot, example: Example, whole: Whole, additions: Additions, train: bool) -> _Pass:
    model = snapshot.model
    recorder = Recorder(model, additions)
    writer = recorder.writer
    call = example.renewed()
    for name, value in call.tensors.items():
        map_results(writer, value, writer.placeholder(name), set(), set())
    try:
        calls, outside = Calls(model, recorder, whole.modules), Outside(model, recorder)
        with snapshot.preserved(), recording(recorder, calls, whole.callees):
            model.train(train)
            with outside.observed():
                output = model(*call.args, **call.kwargs)
        writer.create("output", "output", (argument(writer, output),))
    except UnrepresentableError as error:
        raise CaptureError(
            f"{type(model).__name__} returns a {error}, which a graph cannot rebuild: return tensors in tuples, lists, "
            "dictionaries or dataclasses, or switch that part of the output off in the example inputs"
        ) from error
    except Exception as error:
        raise (rejection(model, error) if has_data(model) else needs_data(model, recorder.failed, error)) from error
    if recorder.refused:  # other obstacles may be its consequences
        raise KeepWholeError((), recorder.refused)
    if obstacles := [*writer.obstacles, *outside.obstacles(snapshot, example, train, whole)]:
        raise KeepWholeError(obstacles)
    guards = recorder.looks.guards(join_whole_lists(writer.graph))
    return _Pass(writer.graph, recorder.returns, Guards(guards, writer.graph), outside.state(writer.graph))
