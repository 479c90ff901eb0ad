"""Cut the copy of the graph that runs into segments: graphs that are called one after the other.

Segments serve whatever needs a part of the model as a module, such as computing activations again in backward. The
graph that users see stays whole.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch import nn
from torch.fx import Graph, Node

from fractrain_fx.capture import RecordedModule
from fractrain_fx.capture.recording.regions import REGIONS
from fractrain_fx.execution.remade import Made
from fractrain_fx.passes.graph.aliases import base, memory_of, written
from fractrain_fx.passes.graph.edit import NAMESPACE, copied
from fractrain_fx.passes.graph.facts import facts
from fractrain_fx.passes.graph.state import (
    ParameterPlace,
    Stateful,
    buffers_changed,
    parameter_at,
    parameters_behind,
    parameters_read,
    stateful,
)

__all__ = ["Segment", "chain", "cut"]

_CHOOSES = ("gate", "choice", "bits", "seed")
"""Roles of nodes that choose something for the step: precisions and the noise of rounding."""

_NOT_RUN = ("placeholder", "get_attr", "output")


@dataclass(frozen=True)
class Segment:
    """Consecutive nodes of a running copy, as a graph on the same modules and parameters.

    ``module`` takes the values of ``inputs`` (nodes of earlier segments, or placeholders, but not parameters) and gives
    a tuple of ``outputs``, which later segments read, or, if it is the last segment, what the whole graph gives. An
    output may lie in the memory of the parameters ``passed_on``, so that later segments read them too. A run may change
    the values of what is ``stateful``. ``once`` is the reason that a second run is not the same as the first.
    """

    module: RecordedModule
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    ops: tuple[str, ...]
    parameters: tuple[ParameterPlace, ...]
    passed_on: tuple[ParameterPlace, ...]
    stateful: Stateful
    once: str | None


def cut(graph_module: RecordedModule, leaves: Collection[str] = ()) -> list[Segment]:
    """The segments of a running copy, in order; one segment if there is no place to cut.

    Gates are segments of their own, so that a block may run again with the precision it has. Without gates a segment
    ends with each residual block. A model without residual blocks is cut after the instances of that module class which
    gives few and short segments. No cut lies between a value and an op that changes it in place. An op makes no operand
    again that another segment has made: backward of a segment has the parameters of that segment only. Modules at the
    paths ``leaves`` were recorded as one node.
    """
    nodes = list(graph_module.graph.nodes)
    free = _free(nodes)
    # The first place from each wish on where the graph may be cut.
    places = sorted({free[at] for wish in _wished(nodes) if (at := bisect_left(free, wish)) < len(free)})
    last = max((place for place, node in enumerate(nodes) if facts(node).op is not None), default=0)
    ends = [0, *(place for place in places if place <= last), len(nodes)]  # the cost alone is no segment
    parts = [nodes[a:b] for a, b in itertools.pairwise(ends)]
    home = {node: number for number, part in enumerate(parts) for node in part}
    changed = frozenset(buffers_changed(graph_module, nodes))
    with _operands_of_others_kept(home):
        return [_segment(graph_module, part, home, leaves, changed) for part in parts]


@contextlib.contextmanager
def _operands_of_others_kept(home: Mapping[Node, int]) -> Iterator[None]:
    """While the context is open, ops know no maker of an operand that lies in another segment."""
    makers = {node: cast(Made, maker) for node in home if (maker := node.kwargs.get("made")) is not None}
    apart = {node: node.kwargs for node, maker in makers.items() if home[cast(Node, maker.value)] != home[node]}
    for node, kwargs in apart.items():
        node.kwargs = {**kwargs, "made": None}
    try:
        yield
    finally:
        for node, kwargs in apart.items():
            node.kwargs = kwargs


def chain(
    graph_module: RecordedModule, segments: Sequence[Segment], wrap: Callable[[Segment], nn.Module]
) -> RecordedModule:
    """A graph that calls ``wrap`` of each segment of ``graph_module`` in order and gives the same values."""
    modules = {f"segment_{number}": wrap(segment) for number, segment in enumerate(segments)}
    graph = Graph()
    values = {node: graph.node_copy(node) for node in graph_module.graph.find_nodes(op="placeholder")}
    for name, segment in zip(modules, segments, strict=True):
        run = graph.call_module(name, tuple(values[node] for node in segment.inputs))
        for place, node in enumerate(segment.outputs):
            values[node] = graph.call_function(operator.getitem, (run, place))
    graph.output(run)
    root = nn.Module()
    root.training = graph_module.training
    return RecordedModule.over(root, dict(modules), graph)


def _segment(
    graph_module: RecordedModule,
    part: Sequence[Node],
    home: dict[Node, int],
    leaves: Collection[str],
    changed: Collection[str],
) -> Segment:
    number = home[part[0]]
    nodes = [node for node in part if node.op not in ("placeholder", "get_attr")]
    read = dict.fromkeys(x for node in nodes for x in node.all_input_nodes)
    inputs = tuple(x for x in read if x.op == "placeholder" or (x.op != "get_attr" and home[x] != number))
    outputs = tuple(node for node in nodes if any(home[user] != number for user in node.users))
    graph, values = copied(inputs, nodes)
    if nodes[-1].op != "output":
        graph.output(tuple(values[node] for node in outputs))
    module = RecordedModule.over(graph_module, graph_module._modules, graph)
    ops = tuple(op.name for node in nodes if (op := facts(node).op) is not None)
    return Segment(
        module,
        inputs,
        outputs,
        ops,
        parameters_read(graph_module, nodes),
        parameters_behind(graph_module, outputs),
        stateful(graph_module, nodes, changed),
        _once(graph_module, nodes, leaves),
    )


def _once(graph_module: RecordedModule, nodes: Sequence[Node], leaves: Collection[str]) -> str | None:
    for node in nodes:
        if facts(node).role in _CHOOSES:
            return "it chooses precisions or noise, and each step chooses once"
        op = facts(node).op
        paths = [str(node.target)] if node.op == "call_module" else []
        for path in [*paths, *([op.module] if op else [])]:
            if path in leaves or path.startswith(f"{NAMESPACE}.methods."):
                return f"{path} was recorded as one node and may keep state of its own"
        for memory in _changed(node):
            if memory.op == "placeholder":
                return f"{node.name} changes an input of the model in place"
            if memory.op == "get_attr" and parameter_at(graph_module, memory) is not None:
                return f"{node.name} changes the parameter {memory.target}"
    return None


def _free(nodes: Sequence[Node]) -> list[int]:
    """The places of a graph where it may be cut, in order. A place is the number of the node behind the cut."""
    barred = [False] * len(nodes)
    number = {node: place for place, node in enumerate(nodes)}
    for node in nodes:
        starts = _changed(node) if node.target not in REGIONS.values() else {base(node)}
        if places := [number[start] for start in starts if start is not None and start.op != "get_attr"]:
            first = min(places) + 1
            barred[first : number[node] + 1] = [True] * (number[node] + 1 - first)
    # A cut lies in front of a node that runs, and behind another one.
    runs = [place for place, node in enumerate(nodes) if node.op not in _NOT_RUN]
    return [place for place in runs[1:] if not barred[place]]


def _changed(node: Node) -> set[Node]:
    """The nodes in whose memory a node may change values."""
    return {memory for operand in written(node) for memory in memory_of(operand)}


def _wished(nodes: Sequence[Node]) -> set[int]:
    """The places where a graph is best cut."""
    runs = [(place, node) for place, node in enumerate(nodes) if node.op not in _NOT_RUN]
    chooses = [(place, facts(node).role in _CHOOSES) for place, node in runs]
    changes = {place for (_, before), (place, now) in itertools.pairwise(chooses) if before != now}
    exits = {place + 1 for place, node in runs if _ends_block(node)}
    if any(facts(node).role == "gate" for _, node in runs):
        return changes | {place for place in exits if place > max(changes)}
    return changes | (exits or _repeated(runs))


def _ends_block(node: Node) -> bool:
    return facts(node).role == "dispatched" or any(block.skip is not None for block in facts(node).blocks)


def _repeated(runs: Sequence[tuple[int, Node]]) -> set[int]:
    """The ends of the instances of one module class: few, with short stretches between them."""
    ends: defaultdict[object, dict[str, int]] = defaultdict(dict)
    for number, (_, node) in enumerate(runs):
        for path, kind in _modules_around(node):
            ends[kind][path] = number + 1
    several = [sorted(set(instances.values())) for instances in ends.values() if len(instances) > 1]
    best = min(several, key=lambda stops: _length(stops, len(runs)), default=[])
    return {runs[number][0] for number in best if number < len(runs)}


def _modules_around(node: Node) -> Iterator[tuple[str, object]]:
    """Path and class of the modules whose forward issued a node, the model itself left out."""
    return ((path, kind) for path, kind in (node.meta.get("nn_module_stack") or {}).values() if path)


def _length(ends: Sequence[int], nodes: int) -> int:
    """The number of cuts and the length of the longest stretch between two of them."""
    return len(ends) + max(b - a for a, b in itertools.pairwise([0, *ends, nodes]))
