"""Compare a recorded graph with its model on one call, and leave no trace.

Guards and circumstances follow from what recording sees a model read. This finds what it does not see: sizes that are
read as text or by C code, settings that are asked for in a way that nobody thought of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.fx import Graph, Interpreter, Node

from fractrain_fx.capture.asked import GRADIENTS, InputFact, ReadCircumstance, RequiresGrad
from fractrain_fx.capture.checking.check import ROUNDING, find_mismatch, trial_of
from fractrain_fx.capture.checking.outcome import outcome_of
from fractrain_fx.capture.checking.verify import locate
from fractrain_fx.capture.inputs.call import Example
from fractrain_fx.capture.layerdrop import dropped_in_graph
from fractrain_fx.capture.model_errors import model_errors
from fractrain_fx.capture.module import RecordedModule
from fractrain_fx.capture.recording.constants import WRITTEN
from fractrain_fx.capture.recording.hooks import HOOKS
from fractrain_fx.capture.recording.kept.leaves import hooks_of, without_users_hooks
from fractrain_fx.capture.recording.writer import Return
from fractrain_fx.capture.source import in_words
from fractrain_fx.capture.state import Snapshot
from fractrain_fx.capture.surroundings import Surroundings
from fractrain_fx.capture.targets import OWN_BACKWARD

__all__ = ["Errors", "FloatGraph", "first_difference"]

_HALF_ROUNDING = 0.05
_GRADIENT_ATTRIBUTES = ("data", "requires_grad")

Errors = Literal["both", "model", "none"]


@dataclass(frozen=True)
class FloatGraph:
    """A recorded graph as it was before passes changed it.

    Attributes:
        graph: a copy of the graph; its nodes name modules and parameters of the recorded module.
        returns: module calls of the recorded run, with nodes of the copy.
        asks_for_gradients: whether what the graph computes depends on gradients.
        decides_gradients: whether calls in it decide about gradients and not about outputs (cuts, hooks, functions with
            a backward of their own).
        hooks: keys of the forward hooks of the model itself, whose operations are in the graph.
        inner_hooks: keys of all hooks that modules had when it was recorded.
    """

    graph: Graph
    returns: tuple[Return, ...]
    asks_for_gradients: bool
    decides_gradients: bool
    hooks: frozenset[int]
    inner_hooks: frozenset[int]

    @classmethod
    def of(
        cls, graph: Graph, returns: Sequence[Return], seen: Sequence[ReadCircumstance], model: nn.Module
    ) -> FloatGraph:
        """A copy of the graph of a model."""
        nodes: dict[Node, Node] = {}
        copied = Graph()
        copied.output(copied.graph_copy(graph, nodes))
        moved = tuple(
            Return(returned.path, tuple(nodes.get(node) if node is not None else None for node in returned.nodes))
            for returned in returns
        )
        read = [noted.circumstance for noted in seen]
        asks = GRADIENTS in read or any(isinstance(circumstance, RequiresGrad) for circumstance in read)
        asks |= any(isinstance(circumstance, InputFact) and circumstance.is_of_gradients for circumstance in read)
        hooks = any(_name(node) in HOOKS for node in graph.nodes)
        decides = hooks or any(map(_decides_gradients, graph.nodes))
        own = frozenset((*model._forward_pre_hooks, *model._forward_hooks))
        return cls(copied, moved, asks or hooks, decides, own, frozenset(hooks_of(model)))


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _decides_gradients(node: Node) -> bool:
    """Whether a node cuts gradients or has a backward of its own, so that outputs do not tell what gradients are."""
    if _name(node) in ("getattr", "setattr"):
        return node.args[1] in _GRADIENT_ATTRIBUTES
    return _name(node) == "detach" or getattr(node.target, OWN_BACKWARD, False)


def first_difference(
    model: nn.Module,
    recorded: RecordedModule,
    plain: FloatGraph,
    call: Example,
    training: bool,
    hooks: frozenset[int],
    *,
    errors: Errors = "both",
) -> str | None:
    """The difference between model and graph on a call, with the module that it comes from; ``None`` if they agree.

    Both run once, from one seed and without gradients, unless what they compute depends on gradients. Outputs are
    compared, in training also buffers, and gradients if calls of the graph decide about them. ``recorded`` has the
    modules and parameters that the graph ``plain`` names. ``errors``: in which of them an error is a difference, if the
    other one runs. ``hooks``: keys of the users' hooks that run.
    """
    around = Surroundings.present(training)
    graph = Interpreter(recorded, graph=plain.graph)
    graph.extra_traceback = False
    backward = training and torch.is_grad_enabled() and plain.decides_gradients
    with _apart(model, around, hooks, plain.asks_for_gradients or backward):
        written = (p for name, p in model.named_parameters() if name in recorded.meta[WRITTEN])
        snapshot = Snapshot(model, around, held=[*model.buffers(), *written], loose=True)
        try:
            trial = trial_of(snapshot, call, training, backward=backward)
        except model_errors() as error:
            if errors == "none":
                return None
            try:
                outcome_of(snapshot, graph, training, call, backward=False)
            except model_errors():
                return None  # the call itself will say why
            return f"the model fails: {type(error).__name__}: {error}"
        mismatch = find_mismatch(snapshot, graph, trial, _rounding(model))
        if mismatch is None or (mismatch.failed and errors != "both"):
            return None
        path = locate(snapshot, recorded, plain.returns, mismatch, plain.graph)
    return f"{mismatch.cause}, first in {path or 'the model'} ({in_words(model.get_submodule(path))})"


def _rounding(model: nn.Module) -> float:
    """The rounding, relative to the largest value, by which two paths to the same result may differ."""
    cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    half = cast or any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
    return _HALF_ROUNDING if half else ROUNDING


@contextlib.contextmanager
def _apart(model: nn.Module, around: Surroundings, hooks: frozenset[int], gradients: bool) -> Iterator[None]:
    """Run model and graph inside as in the call, without other users' hooks, and without what autocast would keep."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(gradients),
            without_users_hooks(model, hooks),
            dropped_in_graph(model),
            around.applied(model),
        ):
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
