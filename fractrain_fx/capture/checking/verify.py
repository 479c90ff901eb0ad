"""Show that a recorded graph equals its model on more samples, and find the module to blame if it does not."""

from __future__ import annotations

import contextlib
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from fractrain_fx.capture.asked import ReadCircumstance
from fractrain_fx.capture.checking.check import Batching, Mismatch, Trial, find_mismatch, repeated
from fractrain_fx.capture.checking.guard_check import Guards
from fractrain_fx.capture.circumstances.python_state import PythonState
from fractrain_fx.capture.compare import same_tensor
from fractrain_fx.capture.inputs.call import Example
from fractrain_fx.capture.model_errors import ignored_model_errors
from fractrain_fx.capture.module import RecordedModule
from fractrain_fx.capture.recording.kept.one_node import OneNodeError
from fractrain_fx.capture.recording.patch import plain_paths
from fractrain_fx.capture.recording.regions import NodeByNode
from fractrain_fx.capture.recording.writer import Obstacle, Return
from fractrain_fx.capture.sizes.guards import Expression, Guard, Place, Size
from fractrain_fx.capture.source import around, forward_code, is_within, listed
from fractrain_fx.capture.state import Snapshot, seeded
from fractrain_fx.capture.trees import tensors_in

__all__ = ["Attempt", "RecordedRun", "check_repeated", "check_trial", "locate", "tie_batch"]


@dataclass(frozen=True)
class RecordedRun:
    """One recorded run; ``returns`` has the module calls in the order in which they ended.

    ``python`` has the attributes whose values decided what was recorded, ``typed`` the numbers of the input tensors
    whose exact type code read.
    """

    graph: Graph
    returns: list[Return]
    guards: Guards
    python: PythonState
    seen: tuple[ReadCircumstance, ...]
    typed: frozenset[int]


@dataclass(frozen=True)
class Attempt:
    """Both modes of a model, recorded with a given set of modules kept whole: one graph or two, and a run for each."""

    graphs: Mapping[bool, RecordedModule]
    runs: Mapping[bool, RecordedRun]


def check_trial(snapshot: Snapshot, attempt: Attempt, trial: Trial, batching: Batching) -> None:
    """Compare the graph with the model; ``OneNodeError`` names the modules where they differ.

    It also names modules whose own code looks at the number of samples.
    """
    values = tuple(trial.example.tensors.values())
    guard = attempt.runs[trial.train].guards.failed_guard(values, attempt.graphs[trial.train], snapshot.model)
    if guard is not None:
        cause = f"run on more samples than it was recorded with, its code takes another way ({guard}, {guard.place})"
        raise OneNodeError([Obstacle(guard.module, cause, line=guard.place.line_only)], compared=True)
    mismatch = find_mismatch(snapshot, attempt.graphs[trial.train], trial)
    if mismatch is None:
        return
    model = snapshot.model
    path = locate(snapshot, attempt.graphs[trial.train], attempt.runs[trial.train].returns, mismatch)
    # Torch's own modules do the same for every batch, so the fault lies in their inputs.
    while path and _is_of_torch(model.get_submodule(path)):
        path = path.rpartition(".")[0]
    mode = "train" if trial.train else "eval"
    # Other modules of the same class do the same. Blaming all at once saves a recording for each.
    kind = type(model.get_submodule(path))
    alike = [name for name, module in model.named_modules() if name and type(module) is kind] if path else [path]
    samples = "as many samples as" if batching is Batching.FIXED else "more samples than"
    cause = f"in {mode} mode, run on {samples} it was recorded with, {mismatch.cause}"
    raise OneNodeError([Obstacle(name, cause) for name in alike], compared=True)


def check_repeated(snapshot: Snapshot, attempt: Attempt, trial: Trial) -> None:
    """Compare the second of two calls in a row, if modules stay one call each: they may keep something.

    If the calls differ, ``OneNodeError`` names the module around all of them.
    """
    graph = attempt.graphs[trial.train]
    called = {str(node.target) for node in graph.graph.nodes if node.op == "call_module"}
    calls = [path for path in sorted(called) if not _is_of_torch(graph.get_submodule(path))]
    words = repeated(snapshot, graph, trial) if calls else None
    if words:
        parts = listed(map(repr, calls))
        cause = f"in a second call {words}: it resets what its parts {parts}, one call each, keep from the first"
        owners = ["" if call.startswith("frac.") else call.rpartition(".")[0] for call in calls]
        raise OneNodeError([Obstacle(around(owners), cause)])


def tie_batch(model: nn.Module, attempt: Attempt, example: Example, axis: int) -> None:
    """Add guards to both graphs for the example's number of samples."""
    code = forward_code(model)
    place = Place(code.co_filename, code.co_firstlineno) if code else Place("?", 0)
    inputs = [(i, x) for i, x in enumerate(example.tensors.values()) if isinstance(x, Tensor) and x.ndim > axis]
    for run in attempt.runs.values():
        sizes = [(Size(run.guards.placeholder(i), axis), x.shape[axis]) for i, x in inputs]
        run.guards.add(Guard(Expression(operator.pos, (size,)), count, "", place) for size, count in sizes)


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def locate(
    snapshot: Snapshot,
    recorded: RecordedModule,
    returns: Sequence[Return],
    mismatch: Mismatch,
    graph: Graph | None = None,
) -> str:
    """Path of the module to blame; the root's is the empty string. ``graph``: instead of that of ``recorded``.

    Modules end innermost first, so the first module call whose outputs differ has no differing call inside. If no
    output differs, the last module in the run that owns one of the wrong gradients or buffers is blamed, because
    gradients flow backwards from it.
    """
    if mismatch.names:
        owners = {name.rpartition(".")[0] for name in mismatch.names}
        known = [returned.path for returned in returns if any(is_within(owner, {returned.path}) for owner in owners)]
        return known[-1] if known else ""
    trial, model = mismatch.trial, snapshot.model
    with plain_paths(value_free=True), torch.enable_grad():
        with snapshot.preserved(), seeded(), _outputs(model) as expected:
            snapshot.set_mode(trial.train)
            trial.example.run(model)
        with snapshot.preserved(), seeded():
            snapshot.set_mode(trial.train)
            recorded.set_mode(trial.train)
            wanted = {node for returned in returns for node in returned.nodes if node is not None}
            values = _Values(recorded, graph or recorded.graph, wanted)
            with ignored_model_errors():  # the search may be for the node that raises
                values.run(*trial.example.renewed().tensors.values())
    calls = {path: iter(outputs) for path, outputs in expected.items()}
    for returned in returns:
        tensors = next(calls.get(returned.path, iter(())), None)
        if tensors is None:
            return returned.path
        for x, node in zip(tensors, returned.nodes, strict=False):
            if node in values.copies and not same_tensor(x, values.copies[node]):
                return returned.path
    return "" if values.now.op == "output" else next(reversed(values.now.meta["nn_module_stack"]))


@contextlib.contextmanager
def _outputs(model: nn.Module) -> Iterator[dict[str, list[list[Tensor]]]]:
    """Copies of the tensors that each module returns, by path and call."""
    outputs: dict[str, list[list[Tensor]]] = defaultdict(list)
    with contextlib.ExitStack() as hooks:
        for path, module in model.named_modules():

            def keep(_: nn.Module, __: Any, output: Any, path: str = path) -> None:
                outputs[path].append([x.detach().clone() for x in tensors_in(output)])

            hooks.enter_context(module.register_forward_hook(keep))
        yield outputs


class _Values(NodeByNode):
    """Runs a graph node by node and keeps copies of some values; ``now`` is the last node that ran, or raised."""

    def __init__(self, recorded: RecordedModule, graph: Graph, wanted: set[Node]) -> None:
        super().__init__(recorded, graph=graph)
        self._wanted = wanted
        self.now: Node = next(iter(graph.nodes))
        self.copies: dict[Node, Tensor] = {}
        self.extra_traceback = False

    def run_node(self, n: Node) -> Any:
        """Keep a copy of a wanted value."""
        self.now = n
        value = super().run_node(n)
        if n in self._wanted and isinstance(value, Tensor):
            self.copies[n] = value.detach().clone()
        return value
