"""Compare a recorded graph with its model on one call, and leave no trace: the first call of its sizes and settings.

Guards and circumstances follow from what recording sees a model read. This finds what it does not see: sizes that are
read as text or by C code, settings that are asked for in a way that nobody thought of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Interpreter, Node
from torch.utils import _pytree as pytree

from fractrain_fx.capture.asked import GRADIENTS, InputFact, RequiresGrad, Seen
from fractrain_fx.capture.checking.check import ROUNDING, Mismatch, Trial
from fractrain_fx.capture.checking.outcome import Outcome, checked_indices
from fractrain_fx.capture.checking.verify import locate
from fractrain_fx.capture.compare import difference
from fractrain_fx.capture.inputs.call import Example
from fractrain_fx.capture.layerdrop import dropped_in_graph
from fractrain_fx.capture.module import RecordedModule
from fractrain_fx.capture.recording.constants import WRITTEN
from fractrain_fx.capture.recording.hooks import HOOKS
from fractrain_fx.capture.recording.kept.leaves import without_users_hooks
from fractrain_fx.capture.recording.patch import plain_paths
from fractrain_fx.capture.recording.writer import Return
from fractrain_fx.capture.source import in_words
from fractrain_fx.capture.state import Snapshot, seeded
from fractrain_fx.capture.surroundings import Surroundings

__all__ = ["FloatGraph", "first_difference"]

_Result = tuple[Any, dict[str, Tensor]]

_HALF_ROUNDING = 0.05


@dataclass(frozen=True)
class FloatGraph:
    """A recorded graph as it was before passes changed it.

    Attributes:
        graph: a copy of the graph; its nodes name modules and parameters of the recorded module.
        returns: module calls of the recorded run, with nodes of the copy.
        asks_for_gradients: whether what the graph computes depends on gradients.
    """

    graph: Graph
    returns: tuple[Return, ...]
    asks_for_gradients: bool

    @classmethod
    def of(cls, graph: Graph, returns: Sequence[Return], seen: Sequence[Seen]) -> FloatGraph:
        """A copy of a graph."""
        nodes: dict[Node, Node] = {}
        copied = Graph()
        copied.output(copied.graph_copy(graph, nodes))
        moved = tuple(
            Return(each.path, tuple(nodes.get(node) if node is not None else None for node in each.nodes))
            for each in returns
        )
        read = [each.circumstance for each in seen]
        asked = GRADIENTS in read or any(isinstance(each, (RequiresGrad, InputFact)) for each in read)
        hooks = any(getattr(node.target, "__name__", "") in HOOKS for node in graph.nodes)
        return cls(copied, moved, asked or hooks)


def first_difference(
    model: nn.Module, recorded: RecordedModule, plain: FloatGraph, call: Example, training: bool
) -> str | None:
    """The difference between model and graph on a call, with the module that it comes from; ``None`` if they agree.

    Both run once, from one seed and without gradients, unless what they compute depends on gradients. Outputs are
    compared, and in training buffers. ``recorded`` has the modules and parameters that the graph ``plain`` names.
    """
    around = Surroundings.present(training)
    with _apart(model, around, plain.asks_for_gradients):
        written = (p for name, p in model.named_parameters() if name in recorded.meta[WRITTEN])
        snapshot = Snapshot(model, around, held=[*model.buffers(), *written])
        expected = _outcome(snapshot, call, training, model)
        actual = _outcome(snapshot, call, training, Interpreter(recorded, graph=plain.graph))
        if isinstance(expected, Exception) or isinstance(actual, Exception):
            if isinstance(expected, Exception) and isinstance(actual, Exception):
                return None  # the call itself will say why
            failed, error = ("model", expected) if isinstance(expected, Exception) else ("graph", actual)
            return f"the {failed} fails: {type(error).__name__}: {error}"
        words = _differ(expected, actual)
        if words and _differ(expected, actual, _rounding(model)) is None:
            # Either the model is not deterministic (atomic additions on a GPU), or it took another path to the same
            # result: one that is told that values must not be read may do so.
            again = _run(snapshot, call, training, model)
            other = _run(snapshot, call, training, model, value_free=True)
            words = None if _differ(expected, again) else _differ(other, actual)
        if words is None:
            return None
        mismatch = Mismatch(Trial(training, call, Outcome(expected[0], {}, frozenset())), words)
        path = locate(snapshot, recorded, plain.returns, mismatch, plain.graph)
    return f"{words}, first in {path or 'the model'} ({in_words(model.get_submodule(path))})"


def _rounding(model: nn.Module) -> float:
    """The rounding, relative to the largest value, by which two paths to the same result may differ."""
    cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    half = cast or any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
    return _HALF_ROUNDING if half else ROUNDING


def _differ(expected: _Result, actual: _Result, tolerance: float = 0.0) -> str | None:
    words = difference(expected[0], actual[0], tolerance=tolerance)
    return words or difference(expected[1], actual[1], "buffers", tolerance=tolerance)


@contextlib.contextmanager
def _apart(model: nn.Module, around: Surroundings, gradients: bool) -> Iterator[None]:
    """Run model and graph inside as in the call, without users' hooks, and without results that autocast would keep."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(gradients),
            without_users_hooks(model),
            dropped_in_graph(model),
            around.applied(model),
        ):
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def _outcome(snapshot: Snapshot, call: Example, training: bool, run: nn.Module | Interpreter) -> _Result | Exception:
    """The result of a run, or its error: a model may raise anything for a call that it does not take.

    Raises:
        torch.OutOfMemoryError: memory is no fault of the call.
    """
    try:
        return _run(snapshot, call, training, run)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return error.with_traceback(None)


def _run(
    snapshot: Snapshot, call: Example, training: bool, run: nn.Module | Interpreter, *, value_free: bool = False
) -> _Result:
    """The output of the model or of a graph, and the buffers after a call in training."""
    call, model = call.renewed(), snapshot.model
    with snapshot.preserved(), plain_paths(value_free=value_free), seeded(), checked_indices(snapshot):
        model.training = training
        if isinstance(run, Interpreter):
            run.extra_traceback = False
            output = run.run(*call.tensors.values())
        else:
            output = run(*call.args, **call.kwargs)
        after = {name: x.clone() for name, x in model.named_buffers()} if training else {}
    return pytree.tree_map_only(Tensor, Tensor.detach, output), after
