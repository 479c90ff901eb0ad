"""Find the state of a part of a running graph: the parameters that it reads, and the buffers that it may change."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from torch import nn
from torch.fx import Node

from fractrain_fx.capture import RecordedModule, TensorWrite
from fractrain_fx.capture.recording.cleanup import has_effect
from fractrain_fx.capture.recording.kept.callees import Method
from fractrain_fx.execution.blocks.dispatched_block import DispatchedBlock
from fractrain_fx.execution.blocks.skipped_norm import SkippedNorm
from fractrain_fx.nn.quantized_leaf import QuantizedLeaf
from fractrain_fx.passes.graph.aliases import memory_of, written
from fractrain_fx.passes.graph.contractions import function_name
from fractrain_fx.passes.graph.edit import owner_module
from fractrain_fx.passes.graph.facts import facts

__all__ = [
    "ParameterPlace",
    "Stateful",
    "buffers_changed",
    "modules_run",
    "parameter_at",
    "parameters_behind",
    "parameters_read",
    "stateful",
]

_NORMS = frozenset({"batch_norm", "instance_norm"})


class ParameterPlace(NamedTuple):
    """Where a parameter is registered. A move, a cast or sharding may put another object there."""

    owner: nn.Module
    name: str

    @property
    def key(self) -> tuple[int, str]:
        """The same for every module that shares the dictionary of parameters, as a recorded module does."""
        return id(self.owner._parameters), self.name


class Stateful(NamedTuple):
    """Paths of modules that may change their buffers, and of buffers that nodes may change, in a part of a graph."""

    modules: tuple[str, ...]
    buffers: tuple[str, ...]


def stateful(graph_module: RecordedModule, nodes: Iterable[Node], changed: Collection[str] = ()) -> Stateful:
    """The state of some nodes: running averages of norms, running ranges of quantizers, and the like.

    Other nodes change the buffers ``changed`` (:func:`buffers_changed`): a second run must read them as they were.
    """
    nodes = list(_with_regions(graph_module, nodes))
    modules, buffers = dict[str, None](), dict.fromkeys(buffers_changed(graph_module, nodes))
    for node in nodes:
        if node.op == "call_module":
            path = _changing(graph_module, node)
            if path is not None and any(True for _ in graph_module.get_submodule(path).buffers()):
                modules[path] = None
        buffers |= dict.fromkeys(
            str(x.target) for x in node.all_input_nodes if x.op == "get_attr" and x.target in changed
        )
    return Stateful(tuple(modules), tuple(buffers))


def buffers_changed(graph_module: RecordedModule, nodes: Iterable[Node]) -> Iterator[str]:
    """Paths of the buffers that some nodes may write to, or replace."""
    for node in _with_regions(graph_module, nodes):
        module = owner_module(graph_module, node)
        may = module is None and (function_name(node) in _NORMS or has_effect(node))
        paths = [str(x.target) for x in _behind(node.all_input_nodes if may else written(node))]
        if isinstance(module, TensorWrite):
            paths.append(module.place)
        yield from (path for path in paths if _is_buffer(graph_module, path))


def parameters_read(graph_module: RecordedModule, nodes: Iterable[Node]) -> tuple[ParameterPlace, ...]:
    """The parameters whose values some nodes read, in order."""
    parameters: dict[tuple[int, str], ParameterPlace] = {}
    for node in _with_regions(graph_module, nodes):
        sources = [x for x in node.all_input_nodes if x.op == "get_attr"]
        places = [place for source in sources if (place := parameter_at(graph_module, source)) is not None]
        for module in modules_run(graph_module, node):
            places += [ParameterPlace(owner, name) for owner in module.modules() for name in owner._parameters]
        parameters |= {place.key: place for place in places}
    return tuple(parameters.values())


def parameters_behind(graph_module: RecordedModule, values: Iterable[Node]) -> tuple[ParameterPlace, ...]:
    """The parameters whose memory some values may share."""
    places = [parameter_at(graph_module, x) for x in _behind(values)]
    return tuple(place for place in places if place is not None)


def _behind(values: Iterable[Node]) -> Iterator[Node]:
    """The nodes that read attributes in whose memory some values may lie."""
    for value in values:
        yield from (x for x in memory_of(value) if x.op == "get_attr")


def parameter_at(graph_module: RecordedModule, node: Node) -> ParameterPlace | None:
    """The parameter that a ``get_attr`` node reads; ``None`` if it reads something else."""
    path, _, name = str(node.target).rpartition(".")
    owner = graph_module.get_submodule(path)
    return ParameterPlace(owner, name) if name in owner._parameters else None


def modules_run(graph_module: RecordedModule, node: Node) -> Iterator[nn.Module]:
    """The modules that a node runs, those included that the called module only refers to."""
    module = owner_module(graph_module, node)
    if module is not None:
        yield module
    if isinstance(module, QuantizedLeaf):
        yield module.leaf
    elif isinstance(module, SkippedNorm):
        yield module.norm.find()
    elif isinstance(module, Method):
        yield module._owner[0]


def _with_regions(graph_module: RecordedModule, nodes: Iterable[Node]) -> Iterator[Node]:
    """The nodes, and those of blocks that were taken out of the graph."""
    for node in nodes:
        yield node
        module = owner_module(graph_module, node)
        if isinstance(module, DispatchedBlock):
            yield from _with_regions(graph_module, module.region.graph.nodes)


def _changing(graph_module: RecordedModule, node: Node) -> str | None:
    """The path of the module that a node runs; ``None`` for inserted modules that only read their buffers."""
    module, role = owner_module(graph_module, node), facts(node).role
    if isinstance(module, SkippedNorm):
        return module.norm.path
    return str(node.target) if role in (None, "range") else None


def _is_buffer(graph_module: RecordedModule, path: str) -> bool:
    owner, _, name = path.rpartition(".")
    return name in graph_module.get_submodule(owner)._buffers
