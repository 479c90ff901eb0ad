"""The front door: record a model on example inputs and show that the graph equals it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph

from fractrain_fx.capture.caches import fill_caches
from fractrain_fx.capture.call import CallSpec, Example, describe_call
from fractrain_fx.capture.check import Trial, find_mismatch, rejection, trials_of
from fractrain_fx.capture.cleanup import join_whole_lists, remove_dead
from fractrain_fx.capture.constants import Additions
from fractrain_fx.capture.data import has_data, needs_data, without_data
from fractrain_fx.capture.leaves import opaque_reason
from fractrain_fx.capture.locate import locate
from fractrain_fx.capture.merge import merge_modes
from fractrain_fx.capture.module import RecordedModule
from fractrain_fx.capture.patch import Calls, recording
from fractrain_fx.capture.recorder import Recorder, Return
from fractrain_fx.capture.state import Snapshot
from fractrain_fx.capture.writer import UnrepresentableError
from fractrain_fx.errors import CaptureError

__all__ = ["Recording", "record"]


@dataclass(frozen=True)
class Recording:
    """A model as a graph.

    Attributes:
        train: the graph in train mode; its output is the model's own output structure.
        eval: the graph in eval mode: the same object where one graph serves both, else one that shares its children.
        call: the form of call that the graph takes.
        leaves: path and reason of each module kept as one node although it holds more than a leaf does.
        args: positional example inputs.
        kwargs: keyword example inputs.
        fixed_batch: whether the model was not seen to run at another batch size than the example's.
        checked: whether the graph was compared with the model; tensors without data (meta) cannot be.
    """

    train: RecordedModule
    eval: RecordedModule
    call: CallSpec
    leaves: Mapping[str, str]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    fixed_batch: bool
    checked: bool

    @property
    def graphs(self) -> tuple[RecordedModule, ...]:
        """The graph that serves both modes, or those of training and evaluation."""
        return (self.train,) if self.eval is self.train else (self.train, self.eval)


@dataclass(frozen=True)
class _Pass:
    """One recorded run."""

    graph: Graph
    returns: list[Return]


@dataclass(frozen=True)
class _Attempt:
    """Both modes recorded with a given set of leaves."""

    train: RecordedModule
    eval: RecordedModule
    returns: Mapping[bool, list[Return]]


class _KeepWholeError(Exception):
    """Modules that must stay one node, with reasons; the model is recorded again."""

    def __init__(self, leaves: Mapping[str, str]) -> None:
        super().__init__()
        self.leaves = leaves


def record(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    batch_axis: int = 0,
    check: bool = True,
) -> Recording:
    """Record one real run of ``model`` in each mode as a graph on the model's own modules and parameters.

    The model is left as it was (buffers, gradients, mode flags and random generators), but for tables that it makes at
    its first call.

    A model on the meta device is recorded from shapes alone: its example inputs go there too, and as there are no
    values, nothing is compared.

    Args:
        model: any module; nothing of it may be called ``frac``.
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
    leaves = {path: reason for path, module in model.named_modules() if path and (reason := opaque_reason(module))}
    snapshot = fill_caches(model, example) if real else Snapshot(model)
    with snapshot.kept(), torch.enable_grad():
        trials, fixed = trials_of(snapshot, example, batch_axis) if check and real else ([], False)
        while True:
            try:
                attempt = _attempt(snapshot, example, leaves)
                for trial in trials:
                    _compare(snapshot, attempt, trial)
                break
            except _KeepWholeError as found:
                leaves |= _checked(model, found.leaves, leaves)
    mode = model.training
    recorded = Recording(
        attempt.train, attempt.eval, example.spec, leaves, tuple(args), dict(kwargs or {}), fixed, bool(trials)
    )
    for graph in recorded.graphs:
        graph.__dict__["training"] = mode
        graph.get_submodule("frac").train(mode)
    return recorded


def _attempt(snapshot: Snapshot, example: Example, leaves: Mapping[str, str]) -> _Attempt:
    model, additions = snapshot.model, Additions()
    passes = {train: _run(snapshot, example, leaves, additions, train) for train in (True, False)}
    one = merge_modes(passes[True].graph, passes[False].graph, additions)
    modules = {**model._modules, "frac": additions.root}
    train = RecordedModule.over(model, modules, passes[True].graph)
    evaluation = train if one else RecordedModule.over(model, modules, passes[False].graph)
    for recorded in (train, evaluation):
        recorded.graph.lint()
    used = {str(n.target) for r in (train, evaluation) for n in r.graph.nodes if n.op == "get_attr"}
    additions.drop_unused(used)
    return _Attempt(train, evaluation, {mode: passes[mode or one].returns for mode in (True, False)})


def _run(snapshot: Snapshot, example: Example, leaves: Mapping[str, str], additions: Additions, train: bool) -> _Pass:
    model = snapshot.model
    recorder = Recorder(model, additions)
    writer = recorder.writer
    call = example.renewed()
    for name, value in call.tensors.items():
        writer.results(value, writer.placeholder(name), set(), set())
    try:
        with snapshot.kept(), recording(recorder, Calls(model, recorder, leaves)):
            model.train(train)
            output = model(*call.args, **call.kwargs)
        writer.create("output", "output", (writer.argument(output),))
    except UnrepresentableError as error:
        raise CaptureError(
            f"{type(model).__name__} returns a {error}, which a graph cannot rebuild: return tensors in tuples, lists, "
            "dictionaries or dataclasses, or switch that part of the output off in the example inputs"
        ) from error
    except Exception as error:
        raise (rejection(model, error) if has_data(model) else needs_data(model, recorder.failed, error)) from error
    if writer.obstacles:
        raise _KeepWholeError({obstacle.module: obstacle.cause for obstacle in writer.obstacles})
    join_whole_lists(writer.graph)
    remove_dead(writer.graph)
    return _Pass(writer.graph, recorder.returns)


def _compare(snapshot: Snapshot, attempt: _Attempt, trial: Trial) -> None:
    recorded = attempt.train if trial.train else attempt.eval
    model = snapshot.model
    mismatch = find_mismatch(snapshot, recorded, trial)
    if mismatch is None:
        return
    path = locate(snapshot, recorded, attempt.returns[trial.train], mismatch)
    mode = "train" if trial.train else "eval"
    # What one module of a class does, the others of that class do too: found together, not one a recording.
    kind = type(model.get_submodule(path))
    alike = [name for name, module in model.named_modules() if name and type(module) is kind] if path else [path]
    cause = f"in {mode} mode, run on more samples than it was recorded with, {mismatch.cause}"
    raise _KeepWholeError(dict.fromkeys(alike, cause))


def _checked(model: nn.Module, found: Mapping[str, str], leaves: Mapping[str, str]) -> dict[str, str]:
    """The modules to keep whole next.

    Raises:
        CaptureError: that is the model itself, or nothing new.
    """
    new = {path: cause for path, cause in found.items() if path not in leaves}
    blamed = "" if "" in new else next(iter(found)) if not new else None
    if blamed is not None:
        kind = type(model.get_submodule(blamed)).__name__
        where = f"module {blamed!r} ({kind})" if blamed else f"{kind} itself"
        raise CaptureError(
            f"{where} cannot be written as a graph: {found[blamed]}. Move that computation into a submodule of its "
            "own, which is then kept as one node, or switch it off in the model's config or the example inputs"
        )
    return new
