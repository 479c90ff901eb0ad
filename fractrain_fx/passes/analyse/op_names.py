"""Name the ops of a graph: an op has one name in all graphs of a model, by its place in the model's code.

Graphs of training and evaluation, and of other inputs, may leave out calls. Numbers alone (``matmul_1``) would then
name another product. Ops share modules such as running ranges by their names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from fractrain_fx.capture import PLACE
from fractrain_fx.passes.graph.arithmetic import arithmetic_of
from fractrain_fx.passes.graph.contractions import function_name
from fractrain_fx.passes.graph.edit import NAMESPACE, owner_module, unique
from fractrain_fx.passes.graph.facts import KNOWN, TRAINED, Op

__all__ = ["NamedOp", "name_ops"]

_NAMED = "named ops"

_NEAR = 3
"""How many calls back two products must be computed alike to be taken for one without any other sign."""


@dataclass(frozen=True)
class NamedOp:
    """An op of a graph, and how to find it in another one.

    Attributes:
        name: its name; empty before it has one.
        base: its name without a number.
        form: the class and the settings of its arithmetic.
        place: the calls of Python code that lead to it.
        lineage: all calls that its operands are computed by.
        line: the line of code.
        near: the last of the calls that its operands are computed by; 0 for an op that is named after its weight.
    """

    name: str
    base: str
    form: Hashable
    place: str
    lineage: int
    line: str
    near: int


# The signs by which an op is found, the surest first, and whether both graphs must have as many ops of that sign.
_SIGNS: tuple[tuple[Callable[[NamedOp], Hashable], bool], ...] = (
    (lambda op: op.place, False),
    (lambda op: op.lineage, False),
    (lambda op: (op.line, op.near), True),
    (lambda op: op.near, True),
)


def name_ops(graph_module: GraphModule, found: Sequence[tuple[Node, Op]]) -> None:
    """Give ops their names: those that they have in the graphs known already, or what they are called by and a number.

    An op that these graphs lack gets another name than theirs, and so modules of its own.
    """
    graphs: list[GraphModule] = graph_module.meta.get(KNOWN, [])
    lineages = _Lineages(graph_module)
    ops = [lineages.op(node, op) for node, op in found]
    names: dict[int, str] = {}
    taken: set[str] = set()
    for graph in graphs:
        known: list[NamedOp] = graph.meta.get(_NAMED, [])
        # The graphs of one recording share the modules that compute, not only those that measure.
        _match(ops, known, names, by_form=graph is graph_module.meta.get(TRAINED))
        taken.update(each.name for each in known)
    for number, (_, op) in enumerate(found):
        op.name = names[number] if number in names else unique(op.name, taken)
        taken.add(op.name)
    graph_module.meta[_NAMED] = [replace(each, name=op.name) for (_, op), each in zip(found, ops, strict=True)]


def _match(ops: Sequence[NamedOp], known: Sequence[NamedOp], names: dict[int, str], *, by_form: bool) -> None:
    """Add the names of the ops, by their numbers, that are found among those of another graph."""
    for sign, as_many in _SIGNS:
        ours, theirs = defaultdict[Hashable, list[int]](list), defaultdict[Hashable, list[str]](list)
        for number, op in enumerate(ops):
            if number not in names:
                ours[op.base, sign(op), by_form and op.form].append(number)
        used = set(names.values())
        for op in known:
            if op.name not in used:
                theirs[op.base, sign(op), by_form and op.form].append(op.name)
        for key, numbers in ours.items():
            if not as_many or len(numbers) == len(theirs[key]):
                names |= zip(numbers, theirs[key], strict=False)


class _Lineages:
    """How the values of a graph are computed, as a number each: values that are computed alike have the same.

    Dropout is passed over, as evaluation leaves it out.
    """

    def __init__(self, graph_module: GraphModule) -> None:
        self._graph_module = graph_module
        self._numbers: dict[Node, int] = {}
        for node in graph_module.graph.nodes:
            self._numbers[node] = self._number(node, self._numbers.__getitem__)

    def op(self, node: Node, op: Op) -> NamedOp:
        """An op that is not named yet."""
        arithmetic = arithmetic_of(node)
        static = None if isinstance(arithmetic, str) else arithmetic.bind(node.args, node.kwargs).static
        near = 0 if _exists(self._graph_module, op.name) else self._near(node, _NEAR)
        place, line = node.meta.get(PLACE, ""), node.meta.get("source") or ""
        return NamedOp("", op.name, repr((op.kind, arithmetic, static)), place, self._numbers[node], line, near)

    def _near(self, node: Node, depth: int) -> int:
        return self._number(node, lambda source: self._near(source, depth - 1)) if depth else 0

    def _number(self, node: Node, of: Callable[[Node], int]) -> int:
        owner = owner_module(self._graph_module, node)
        called = function_name(node) if owner is None else type(owner).__name__
        if "drop" in called.lower() and node.args and isinstance(node.args[0], Node):
            return of(node.args[0])
        target = str(node.target)
        name = called if node.op == "call_function" else "" if target.startswith(f"{NAMESPACE}.constants.") else target
        given: list[Any] = []
        map_aggregate((node.args, node.kwargs), given.append)
        numbers = (of(each) if isinstance(each, Node) else repr(each) for each in given if not isinstance(each, bool))
        return hash((node.op, name, *numbers))


def _exists(graph_module: GraphModule, path: str) -> bool:
    """Whether a path is that of a part or a parameter, as the name of an op that has a weight is."""
    try:
        attrgetter(path)(graph_module)
    except AttributeError:
        return False
    return True
