"""Show that a recorded graph equals its model on more samples, and find the module to blame if it does not."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

from torch import Tensor, nn
from torch.fx import Graph

from fractrain_fx.capture.asked import Seen
from fractrain_fx.capture.checking.check import (
    Batching,
    Mismatch,
    Trial,
    find_mismatch,
    repeated,
)
from fractrain_fx.capture.checking.guard_check import Guards
from fractrain_fx.capture.checking.locate import locate
from fractrain_fx.capture.circumstances.outside import PythonState
from fractrain_fx.capture.inputs.call import Example
from fractrain_fx.capture.module import RecordedModule
from fractrain_fx.capture.recording.kept.one_node import OneNodeError
from fractrain_fx.capture.recording.writer import Obstacle, Return
from fractrain_fx.capture.sizes.guards import Expression, Guard, Place, Size
from fractrain_fx.capture.source import forward_code, listed
from fractrain_fx.capture.state import Snapshot

__all__ = ["Attempt", "Run", "check_repeated", "check_trial", "tie_batch"]


@dataclass(frozen=True)
class Run:
    """One recorded run.

    Attributes:
        graph: its graph.
        returns: module calls in the order in which they ended.
        guards: conditions on sizes.
        python: attributes whose values decided what was recorded.
        seen: the circumstances that code read.
        typed: numbers of the input tensors whose exact type code read.
    """

    graph: Graph
    returns: list[Return]
    guards: Guards
    python: PythonState
    seen: tuple[Seen, ...]
    typed: frozenset[int]


@dataclass(frozen=True)
class Attempt:
    """Both modes of a model, recorded with a given set of modules kept whole: one graph or two, and a run for each."""

    train: RecordedModule
    eval: RecordedModule
    runs: Mapping[bool, Run]

    def graph(self, train: bool) -> RecordedModule:
        """The graph of one mode."""
        return self.train if train else self.eval


def check_trial(snapshot: Snapshot, attempt: Attempt, trial: Trial, batching: Batching) -> None:
    """Compare the graph with the model.

    Raises:
        OneNodeError: they differ, or the model's own code looks at the number of samples; names the modules to blame.
    """
    values = tuple(trial.example.tensors.values())
    guard = attempt.runs[trial.train].guards.failed_guard(values, attempt.graph(trial.train), snapshot.model)
    if guard is not None:
        cause = f"run on more samples than it was recorded with, its code takes another way ({guard}, {guard.place})"
        raise OneNodeError([Obstacle(guard.module, cause, line=guard.place.line_only)], compared=True)
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
    raise OneNodeError([Obstacle(name, cause) for name in alike], compared=True)


def check_repeated(snapshot: Snapshot, attempt: Attempt, trial: Trial) -> None:
    """Compare the second of two calls in a row, if modules stay one call each: they may keep something.

    Raises:
        OneNodeError: the graph's second call differs from the model's; names the module around all of them.
    """
    graph = attempt.graph(trial.train)
    called = {str(node.target) for node in graph.graph.nodes if node.op == "call_module"}
    calls = [path for path in sorted(called) if not _is_of_torch(graph.get_submodule(path))]
    words = repeated(snapshot, graph, trial) if calls else None
    if words:
        parts = listed(map(repr, calls))
        cause = f"in a second call {words}: it resets what its parts {parts}, one call each, keep from the first"
        owners = [[] if call.startswith("frac.") else call.split(".")[:-1] for call in calls]
        around = takewhile(lambda names: len(set(names)) == 1, zip(*owners, strict=False))
        raise OneNodeError([Obstacle(".".join(names[0] for names in around), cause)])


def tie_batch(model: nn.Module, attempt: Attempt, example: Example, axis: int) -> None:
    """Add guards to both graphs for the example's number of samples."""
    code = forward_code(model)
    place = Place(code.co_filename, code.co_firstlineno) if code else Place("?", 0)
    inputs = [(i, x) for i, x in enumerate(example.tensors.values()) if isinstance(x, Tensor) and x.ndim > axis]
    for run in attempt.runs.values():
        sizes = [(Size(run.guards.placeholder(i), axis), x.shape[axis]) for i, x in inputs]
        run.guards.add(Guard(Expression(operator.pos, (size,)), count, "", place) for size, count in sizes)


def _blamed(snapshot: Snapshot, attempt: Attempt, mismatch: Mismatch) -> str:
    train = mismatch.trial.train
    path = locate(snapshot, attempt.graph(train), attempt.runs[train].returns, mismatch)
    # Torch's own modules do the same for every batch, so the fault lies in their inputs.
    while path and _is_of_torch(snapshot.model.get_submodule(path)):
        path = path.rpartition(".")[0]
    return path


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")
