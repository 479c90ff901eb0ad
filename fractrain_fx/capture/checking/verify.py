"""Show that a recorded graph equals its model: on more samples, on one, and at other lengths and image sizes."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from torch import Tensor, nn

from fractrain_fx.capture.asked import Seen
from fractrain_fx.capture.checking.check import (
    Batching,
    Mismatch,
    Trial,
    find_mismatch,
    raise_if_lost,
    repeated,
    trial_of,
)
from fractrain_fx.capture.checking.guard_check import Guards
from fractrain_fx.capture.checking.locate import locate
from fractrain_fx.capture.circumstances.outside import PythonState
from fractrain_fx.capture.inputs.batch import batch_size
from fractrain_fx.capture.inputs.call import Example
from fractrain_fx.capture.inputs.other_sizes import Change, Length, dims_of, lengths, longer, shorter
from fractrain_fx.capture.module import RecordedModule
from fractrain_fx.capture.recording.kept.whole import KeepWholeError
from fractrain_fx.capture.recording.writer import Obstacle, Return
from fractrain_fx.capture.sizes.guards import Expression, Guard, Place, Size
from fractrain_fx.capture.sizes.input_values import InputValues
from fractrain_fx.capture.source import forward_code
from fractrain_fx.capture.state import Snapshot

__all__ = ["Attempt", "Elsewhere", "broken", "check_repeated", "check_trial", "tie_batch"]


@dataclass(frozen=True)
class Attempt:
    """Both modes of a model, recorded with a given set of modules kept whole.

    Attributes:
        train: the graph in train mode.
        eval: the graph in eval mode, or the same object.
        returns: module calls of the recorded run in train (``True``) and eval mode.
        guards: conditions on sizes for the graph of each mode.
        python: attributes whose values decided what was recorded.
        seen: for each mode, the circumstances that code read.
        typed: numbers of the input tensors whose exact type code read.
    """

    train: RecordedModule
    eval: RecordedModule
    returns: Mapping[bool, list[Return]]
    guards: Mapping[bool, Guards]
    python: PythonState
    seen: Mapping[bool, tuple[Seen, ...]]
    typed: frozenset[int]

    def graph(self, train: bool) -> RecordedModule:
        """The graph of one mode."""
        return self.train if train else self.eval


def broken(snapshot: Snapshot, attempt: Attempt, example: Example, train: bool) -> Guard | InputValues | None:
    """The first guard that does not hold for a call."""
    values = tuple(example.tensors.values())
    return attempt.guards[train].broken(values, attempt.graph(train), snapshot.model)


def check_trial(snapshot: Snapshot, attempt: Attempt, trial: Trial, batching: Batching) -> None:
    """Compare the graph with the model.

    Raises:
        KeepWholeError: they differ, or the model's own code looks at the number of samples; names the modules to blame.
    """
    guard = broken(snapshot, attempt, trial.example, trial.train)
    if guard is not None:
        cause = f"run on more samples than it was recorded with, its code takes another way ({guard}, {guard.place})"
        raise KeepWholeError([Obstacle(guard.module, cause, line=guard.place.line_only)], compared=True)
    mismatch = find_mismatch(snapshot, attempt.graph(trial.train), trial)
    if mismatch is None:
        return
    path = _blamed(snapshot, attempt, mismatch)
    model = snapshot.model
    mode = "train" if trial.train else "eval"
    # Other modules of the same class do the same. Blaming all at once saves a recording for each.
    kind = type(model.get_submodule(path))
    alike = [name for name, module in model.named_modules() if name and type(module) is kind] if path else [path]
    samples = "as many samples as" if batching is Batching.FIXED else "more samples than"
    cause = f"in {mode} mode, run on {samples} it was recorded with, {mismatch.cause}"
    raise KeepWholeError([Obstacle(name, cause) for name in alike], compared=True)


def check_repeated(snapshot: Snapshot, attempt: Attempt, trial: Trial) -> None:
    """Compare the second of two calls in a row, if modules stay one call each: they may keep something.

    Raises:
        KeepWholeError: the graph's second call differs from the model's; names the module around all of them.
    """
    graph = attempt.graph(trial.train)
    called = {str(node.target) for node in graph.graph.nodes if node.op == "call_module"}
    calls = [path for path in sorted(called) if not _is_of_torch(graph.get_submodule(path))]
    words = repeated(snapshot, graph, trial) if calls else None
    if words:
        parts = ", ".join(map(repr, calls[:3])) + (f" and {len(calls) - 3} more" if len(calls) > 3 else "")
        cause = f"in a second call {words}: it resets what its parts {parts}, one call each, keep from the first"
        owners = [[] if call.startswith("frac.") else call.split(".")[:-1] for call in calls]
        around = takewhile(lambda names: len(set(names)) == 1, zip(*owners, strict=False))
        raise KeepWholeError([Obstacle(".".join(names[0] for names in around), cause)])


class Elsewhere:
    """Runs of the model in one mode at other sizes than the example's, each made once, when first needed.

    Sizes that the model itself refuses are left out.

    Args:
        snapshot: the model.
        example: the call that is recorded.
        axis: the dimension of the inputs that holds the samples.
        batching: how inputs grow with the number of samples.
        train: the mode.
    """

    def __init__(self, snapshot: Snapshot, example: Example, axis: int, batching: Batching, *, train: bool) -> None:
        self._snapshot, self._example, self._axis, self._batching = snapshot, example, axis, batching
        self._train = train
        self._inputs = (example.args, example.kwargs)
        self._trials: dict[Change, Trial | None] = {}

    def check(self, attempt: Attempt) -> None:
        """Compare the graph with the model at other sizes; if they differ, add guards for the recorded sizes.

        What differs in eval mode is taken to differ in train mode too. A graph that both modes share is compared once.
        """
        if self._train and attempt.train is attempt.eval:
            return
        samples = batch_size(self._inputs, self._axis, packed=self._batching is Batching.PACKED) or 1
        one = 1 if samples > 1 and self._batching is not Batching.FIXED else None
        found = lengths(self._inputs, self._axis)
        # One run of one sample at another length checks both changes, if it agrees.
        whole = [Change(one, Length(found[0], other(found[0]))) for other in (shorter, longer)] if found else []
        apart = [change for change in whole if not self._agrees(attempt, change)]
        if one and len(apart) == len(whole):
            self._settle(attempt, Change(one))
        for change in apart:
            self._settle_length(attempt, change.length)
        for before in found[1:]:
            self._settle_length(attempt, Length(before, longer(before)))

    def _agrees(self, attempt: Attempt, change: Change) -> bool:
        """Whether graph and model agree for several changes at once."""
        trial = self._trial(change)
        if trial is None or broken(self._snapshot, attempt, trial.example, self._train) is not None:
            return False
        return find_mismatch(self._snapshot, attempt.graph(self._train), trial) is None

    def _settle_length(self, attempt: Attempt, length: Length | None) -> None:
        """Try one length; if the model refuses it, try it in each dimension of that size alone."""
        if length is None or self._settle(attempt, Change(length=length)):
            return
        dims = dims_of(self._inputs, self._axis, length.before)
        for dim in dims if len(dims) > 1 else ():
            self._settle(attempt, Change(length=replace(length, dim=dim)))

    def _settle(self, attempt: Attempt, change: Change) -> bool:
        """Compare, and add guards if the graph differs; returns whether the model runs with the change."""
        trial = self._trial(change)
        if trial is None:
            return False
        if broken(self._snapshot, attempt, trial.example, self._train) is None:
            mismatch = find_mismatch(self._snapshot, attempt.graph(self._train), trial)
            if mismatch is not None:
                place = _place(self._snapshot.model, _blamed(self._snapshot, attempt, mismatch))
                for guards in [attempt.guards[True]] if self._train else attempt.guards.values():
                    guards.add(self._ties(guards, change, *place))
        return True

    def _ties(self, guards: Guards, change: Change, path: str, place: Place) -> Iterator[Guard]:
        for node, x in _inputs(guards, self._example):
            if change.batch is not None and x.ndim > self._axis:
                yield Guard(Expression(operator.gt, (Size(node, self._axis), 1)), True, path, place)
            for dim, size in enumerate(x.shape):
                if change.length is not None and dim != self._axis and change.length.changes(dim, size):
                    yield Guard(Expression(operator.pos, (Size(node, dim),)), size, path, place)

    def _trial(self, change: Change) -> Trial | None:
        if change not in self._trials:
            try:
                changed = change.of(self._inputs, self._axis, packed=self._batching is Batching.PACKED)
                call = self._example.on(*changed)
                self._trials[change] = trial_of(self._snapshot, call, self._train)
            except Exception as error:  # a model may raise anything for sizes that it does not take
                raise_if_lost(error)
                self._trials[change] = None
        return self._trials[change]


def tie_batch(model: nn.Module, attempt: Attempt, example: Example, axis: int) -> None:
    """Add guards to both graphs for the example's number of samples."""
    path, place = _place(model, "")
    for guards in attempt.guards.values():
        sizes = [(Size(node, axis), x.shape[axis]) for node, x in _inputs(guards, example) if x.ndim > axis]
        guards.add(Guard(Expression(operator.pos, (size,)), count, path, place) for size, count in sizes)


def _inputs(guards: Guards, example: Example) -> Iterator[tuple[Any, Tensor]]:
    """The node and the example value of each input that is a tensor."""
    for index, value in enumerate(example.tensors.values()):
        if isinstance(value, Tensor):
            yield guards.placeholder(index), value


def _blamed(snapshot: Snapshot, attempt: Attempt, mismatch: Mismatch) -> str:
    train = mismatch.trial.train
    path = locate(snapshot, attempt.graph(train), attempt.returns[train], mismatch)
    # Torch's own modules do the same for every batch, so the fault lies in their inputs.
    while path and _is_of_torch(snapshot.model.get_submodule(path)):
        path = path.rpartition(".")[0]
    return path


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _place(model: nn.Module, path: str) -> tuple[str, Place]:
    """A module's path with the first line of its forward."""
    code = forward_code(model.get_submodule(path))
    return path, Place(code.co_filename, code.co_firstlineno) if code else Place("?", 0)
