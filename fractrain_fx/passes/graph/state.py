"""Find the modules and buffers whose values a part of a running graph may change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch.fx import Node

from fractrain_fx.capture import RecordedModule
from fractrain_fx.capture.recording.cleanup import has_effect
from fractrain_fx.execution.blocks.dispatched_block import DispatchedBlock
from fractrain_fx.execution.blocks.skipped_norm import SkippedNorm
from fractrain_fx.passes.graph.contractions import function_name
from fractrain_fx.passes.graph.edit import owner_module
from fractrain_fx.passes.graph.facts import facts

__all__ = ["Stateful", "stateful"]

_NORMS = frozenset({"batch_norm", "instance_norm"})


class Stateful(NamedTuple):
    """State of a part of a graph.

    Attributes:
        modules: paths of modules that may change their buffers.
        buffers: paths of buffers that nodes may change.
    """

    modules: tuple[str, ...]
    buffers: tuple[str, ...]


def stateful(graph_module: RecordedModule, nodes: Iterable[Node]) -> Stateful:
    """The state of some nodes: running averages of norms, running ranges of quantizers, and the like."""
    modules, buffers = dict[str, None](), dict[str, None]()
    for node in _with_regions(graph_module, nodes):
        if node.op == "call_module":
            path = _changing(graph_module, node)
            if path is not None and any(True for _ in graph_module.get_submodule(path).buffers()):
                modules[path] = None
        elif function_name(node) in _NORMS or has_effect(node):
            read = [str(x.target) for x in node.all_input_nodes if x.op == "get_attr"]
            buffers |= dict.fromkeys(path for path in read if _is_buffer(graph_module, path))
    return Stateful(tuple(modules), tuple(buffers))


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
