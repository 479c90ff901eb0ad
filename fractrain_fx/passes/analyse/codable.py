"""Find the weights that could be kept as codes: those that one quantizer reads, and nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch.fx import Node

from fractrain_fx.capture import RecordedModule
from fractrain_fx.config import CODE_BITS, FracConfig
from fractrain_fx.nn.quantizers import WeightQuantizer
from fractrain_fx.passes.graph.facts import Op, facts, ops_of
from fractrain_fx.passes.graph.state import modules_run, parameter_at

__all__ = ["Reader", "Readers", "codable", "readers_of"]

Reader = tuple[RecordedModule, Node]
"""A graph, and a node of it that reads a parameter or calls a module which does."""

Readers = Mapping[int, list[Reader]]
"""The readers of each parameter, by its identity."""


@dataclass(frozen=True)
class Codable:
    """A weight that could be kept as codes, with the path of its quantizer and the forward bits in the first stage."""

    quantizer: str
    bits: int


def readers_of(graphs: Iterable[RecordedModule]) -> Readers:
    """All readers of all parameters of rewritten graphs."""
    readers: defaultdict[int, list[Reader]] = defaultdict(list)
    for graph_module in graphs:
        for node in graph_module.graph.nodes:
            if node.op == "get_attr" and (place := parameter_at(graph_module, node)) is not None:
                readers[id(place.owner._parameters[place.name])].append((graph_module, node))
            for module in modules_run(graph_module, node):
                for parameter in module.parameters():
                    readers[id(parameter)].append((graph_module, node))
    return readers


def codable(names: list[str], readers: list[Reader], config: FracConfig) -> Codable | str:
    """Whether a parameter could be kept as codes; if not, the reason. ``names`` are all that it has in the model."""
    if len(names) > 1:
        return f"shared by {' and '.join(names)}"
    if "." not in names[0]:
        return "held by the model itself"
    ops: dict[str, tuple[RecordedModule, Op]] = {}
    for graph_module, node in readers:
        if node.op != "get_attr":
            return "read inside a module that the graph calls, as embeddings and norms are"
        for user in node.users:
            record = facts(user)
            if record.role != "weight" or user.op != "call_module":
                return _why(user)
            op = next(op for _, op in ops_of(graph_module.graph) if op.name == record.owner)
            ops[str(user.target)] = graph_module, op
    if len(ops) != 1:
        return "rounded in several ways" if ops else "read by no graph"
    ((path, (graph_module, op)),) = ops.items()
    quantizer, bits = graph_module.get_submodule(path), _bits(op, config)
    if not (isinstance(quantizer, WeightQuantizer) and quantizer.fmt.has_codes):
        return f"rounded in format {op.precision.format or config.format!r}"
    if len({stage.fw for stage in op.precision.stages or ()}) > 1:
        return "rounded to other bits in other stages, and codes have one width"
    if not 0 < bits <= CODE_BITS:
        return f"rounded to {bits} bits, and codes have at most {CODE_BITS}"
    return Codable(path, bits)


def _why(user: Node) -> str:
    op = facts(user).op
    if facts(user).role == "fused":
        return "rounded anew for each product"
    if op is not None:
        return f"multiplied in float ({op.precision.reason})"
    return "looked up, added or scaled with, not multiplied"


def _bits(op: Op, config: FracConfig) -> int:
    fixed = op.weight_bits(config)
    return op.options(config)[0].fw if fixed is None else fixed
