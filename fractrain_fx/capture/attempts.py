"""Record a model again and again, with more and more modules as one node each, until graph and model agree."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn
from torch.fx import Graph

from fractrain_fx.capture.checking.check import Batching, Trial, trials_of
from fractrain_fx.capture.checking.decided import test_decided_sizes
from fractrain_fx.capture.checking.guard_check import Guards
from fractrain_fx.capture.checking.verify import Attempt, RecordedRun, check_repeated, check_trial, tie_batch
from fractrain_fx.capture.circumstances.outside import Outside
from fractrain_fx.capture.circumstances.python_state import set_across
from fractrain_fx.capture.inputs.call import Arguments, Example
from fractrain_fx.capture.inputs.data import has_data, needs_data, rejection
from fractrain_fx.capture.model_errors import model_errors
from fractrain_fx.capture.module import RecordedModule
from fractrain_fx.capture.recording.arguments import argument, map_results
from fractrain_fx.capture.recording.cleanup import join_whole_lists, merge_modes, remove_dead, same_calls
from fractrain_fx.capture.recording.constants import WRITTEN, Additions
from fractrain_fx.capture.recording.fresh import copy_fresh, exposed_constants
from fractrain_fx.capture.recording.kept.leaves import opaque_reason
from fractrain_fx.capture.recording.kept.one_node import OneNodeError, OneNodes
from fractrain_fx.capture.recording.patch import Calls, recording
from fractrain_fx.capture.recording.recorder import Recorder
from fractrain_fx.capture.recording.writer import Obstacle, UnrepresentableError
from fractrain_fx.capture.sizes.guards import holds_sizes
from fractrain_fx.capture.source import in_words, listed
from fractrain_fx.capture.state import Snapshot
from fractrain_fx.capture.trees import tensors_in
from fractrain_fx.errors import CaptureError

__all__ = ["record_until_equal"]

# If modules that are one node each hold this share of the parameters, little is left to choose bits for.
_MOST = 0.5

_NONE = (-1,)  # no read has this number: Python code gets the true values in another run

# If values are read at more places than this, and any of them decides what is computed, all are taken to.
_APART = 4


@dataclass(frozen=True)
class EqualRecording:
    """A recording that equals the model."""

    attempt: Attempt
    one_nodes: OneNodes
    batching: Batching
    checked: bool


def record_until_equal(snapshot: Snapshot, example: Example, axis: int, check: bool) -> EqualRecording:
    """Record; if values of inputs that hold sizes force most of the model into single nodes, for these values alone.

    Args:
        snapshot: the model.
        example: the call.
        axis: the dimension that holds the samples.
        check: compare graph and model.
    """
    compared, model = partial(_compared, snapshot, example, axis, check), snapshot.model
    named = example.tensors.items() if has_data(model) else ()
    sizes = frozenset(name for name, value in named if holds_sizes(value))
    try:
        untied = compared()
    except CaptureError:
        if not sizes:
            raise
        return compared(sizes)
    if not sizes or untied.one_nodes.share(model) < _MOST:
        return untied
    try:
        return min(untied, compared(sizes), key=lambda candidate: candidate.one_nodes.share(model))
    except CaptureError:
        return untied


def _compared(
    snapshot: Snapshot, example: Example, axis: int, check: bool, tied: frozenset[str] = frozenset()
) -> EqualRecording:
    """Record and compare until graph and model agree, with more and more modules as one node each.

    The values of inputs in ``tied`` are fixed.
    """
    closed = {path: why for path, part in snapshot.model.named_modules() if path and (why := opaque_reason(part))}
    one_nodes = OneNodes(dict(closed))
    trials: list[Trial] = []
    batching = Batching.FIXED if tied else Batching.ROWS
    if check:
        trials, batching = trials_of(snapshot, example, axis, grow=not tied)
    while True:
        try:
            attempt = _attempt(snapshot, example, one_nodes, tied)
            for trial in trials:
                check_trial(snapshot, attempt, trial, batching)
                check_repeated(snapshot, attempt, trial)
            break
        except OneNodeError as error:
            new, other_functions = one_nodes.add(error.obstacles, error.refused)
            if other_functions and not new:
                continue
            try:
                one_nodes.keep(snapshot.model, new)
            except CaptureError:
                if not error.compared or batching is Batching.FIXED:
                    raise
                # The model's own code counts its samples, so the graph only holds for the number in the example.
                one_nodes = OneNodes(dict(closed))
                trials, batching = trials_of(snapshot, example, axis, grow=False)
    if batching is Batching.FIXED:
        tie_batch(snapshot.model, attempt, example, axis)
    return EqualRecording(attempt, one_nodes, batching, bool(trials))


def _attempt(snapshot: Snapshot, example: Example, one_nodes: OneNodes, tied: frozenset[str]) -> Attempt:
    model, additions = snapshot.model, Additions(snapshot.tensors)
    runs = {train: _run(snapshot, example, one_nodes, additions, train, tied) for train in (True, False)}
    if obstacles := set_across({train: run.python for train, run in runs.items()}, snapshot, example):
        raise OneNodeError(obstacles)
    graphs = runs[True].graph, runs[False].graph
    # Merge before removing dead nodes: an unused branch that draws random numbers would stay in training only.
    one = merge_modes(*graphs, additions)
    for graph in graphs:
        remove_dead(graph)
    if one or merge_modes(*graphs, additions):
        runs[False] = replace(runs[False], graph=graphs[0], returns=runs[True].returns)
    modules = {**model._modules, "frac": additions.root}
    train = RecordedModule.over(model, modules, graphs[0])
    evaluation = train if runs[False].graph is graphs[0] else RecordedModule.over(model, modules, graphs[1])
    changed = {name for name, p in model.named_parameters() if id(p) in snapshot.changed}
    written = frozenset(additions.written | changed)
    for recorded in (train, evaluation):
        recorded.meta[WRITTEN] = written
        recorded.graph.lint()
    used = {str(n.target) for r in (train, evaluation) for n in r.graph.nodes if n.op == "get_attr"}
    additions.drop_unused(used.union(*(run.guards.constants for run in runs.values())))
    return Attempt({True: train, False: evaluation}, runs)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep what a model prints and logs to itself."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _leaks(
    run: Callable[[Collection[int]], RecordedRun], graph: Graph, reads: Sequence[Obstacle], additions: Additions
) -> list[Obstacle]:
    """The reads of values that decide more than the numbers that the graph computes from them.

    The model is recorded again, and Python code gets other values. A value that it only passes on, returns or prints
    leads to the same graph. One that it takes as an index or a size, or writes into a text that is used, does not.
    """

    def decides(places: Collection[int]) -> bool:
        try:
            with _silence():
                return not same_calls(graph, run(places).graph, additions)
        except model_errors():  # of the model, or of the recorder for values that cannot be
            return True

    if not reads or not decides(range(len(reads))):
        return []
    leaks = [read for place, read in enumerate(reads) if decides([place])] if 1 < len(reads) <= _APART else []
    return leaks or list(reads)


def _run(
    snapshot: Snapshot,
    example: Example,
    one_nodes: OneNodes,
    additions: Additions,
    train: bool,
    tied: frozenset[str],
    spoofed: Collection[int] = (),
) -> RecordedRun:
    model = snapshot.model
    recorder = Recorder(model, additions)
    writer = recorder.writer
    recorder.reads.spoofed = spoofed
    call = example.renewed()
    for name, value in call.tensors.items():
        map_results(writer, value, writer.placeholder(name, name in tied), set(), set())
    recorder.ambient.inputs = tuple(tensors_in(call.tensors))
    arguments = Arguments(call)
    calls = Calls(model, recorder, one_nodes.modules)
    try:
        outside = Outside(model, recorder)
        watched = snapshot.surroundings.watched(recorder.ambient)
        with snapshot.preserved(), watched, recording(recorder, calls, one_nodes.callees):
            snapshot.set_mode(train)
            with outside.observed():
                output = model(*call.args, **call.kwargs)
        writer.returning = True
        writer.create("output", "output", (argument(writer, output),))
    except UnrepresentableError as error:
        raise CaptureError(
            f"{in_words(model)} returns a {error}, which a graph cannot rebuild: return tensors in tuples, lists, "
            "dictionaries or dataclasses, or switch that part of the output off in the example inputs"
        ) from error
    except model_errors() as error:
        if calls.arrays:  # code that works on them may not take tensors
            raise OneNodeError((), calls.arrays) from error
        if has_data(model):
            raise rejection(type(model).__name__, error) from error
        raise needs_data(model, recorder.failed, error) from error
    notes = arguments.notes(model, output)
    if recorder.refused:  # other obstacles may be its consequences
        raise OneNodeError((), recorder.refused)
    if obstacles := [*writer.obstacles, *outside.obstacles(snapshot, example, train, one_nodes)]:
        raise OneNodeError(obstacles)
    if not spoofed:
        again = partial(_run, snapshot, example, one_nodes, additions, train, tied)
        reads = [obstacle for _, obstacle in recorder.reads.of_values]
        if leaks := _leaks(again, writer.graph, reads, additions):
            raise OneNodeError(leaks)
        if exposed := exposed_constants(writer.graph, additions):
            with contextlib.suppress(OneNodeError, ValueError), _silence():  # another run may go another way
                copy_fresh(writer.graph, again(_NONE).graph, exposed, additions)
    notes += recorder.reads.notes() + calls.notes()
    guards = recorder.reads.guards(join_whole_lists(writer.graph))
    values = recorder.reads.values_of(call.tensors, tied)
    circumstances = recorder.ambient.seen(str(node.target) for node in writer.graph.find_nodes(op="call_module"))
    if line := snapshot.surroundings.left_off:
        notes.append(f"forward leaves gradients switched off for the code after it ({line}), which a graph does not do")
    if tags := {name for x in tensors_in(output) for name in vars(x) if not isinstance(x, nn.Parameter)}:
        notes.append(
            f"forward sets {listed(sorted(tags))} on a tensor that it returns, which the rewritten model does not"
        )
    python = outside.state(writer.graph, notes)
    held = Guards(guards, writer.graph, values), python, circumstances, recorder.ambient.typed_inputs()
    if not spoofed:
        test_decided_sizes(writer, guards, model)
    writer.release()
    return RecordedRun(writer.graph, recorder.returns, *held)
