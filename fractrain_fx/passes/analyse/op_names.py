"""Name the ops of a graph: an op has one name in all graphs of a model, by what computes it and its place in the code.

Graphs of training and evaluation, and of other inputs, may leave out calls. Numbers alone (``matmul_1``) would then
name another product. Ops share modules such as running ranges by their names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from operator import attrgetter
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from fractrain_fx.capture import PLACE
from fractrain_fx.passes.graph.arithmetic import arithmetic_of
from fractrain_fx.passes.graph.contractions import function_name
from fractrain_fx.passes.graph.edit import NAMESPACE, owner_module, unique
from fractrain_fx.passes.graph.facts import KNOWN, TRAINED, Op

__all__ = ["name_ops"]

_NAMED = "named ops"
"""Key of a graph's ``meta``: the signs of each op, by its name."""

_NEAR = 3
"""How many calls back two products must be computed alike to be taken for one without any other sign."""


@dataclass(frozen=True)
class _Signs:
    """Signs by which an op is found in another graph; ``base`` is its name without a number.

    ``form`` is the class and the settings of its arithmetic. ``place`` stands for the calls of Python code that lead to
    it, ``lineage`` for all calls that its result is computed by, ``near`` for the last of these; 0 for an op that is
    named after its weight.
    """

    base: str
    form: str
    place: int
    lineage: int
    near: int


# The surest first, each with whether both graphs must have as many ops of that sign.
_BY_CERTAINTY: tuple[tuple[Callable[[_Signs], Hashable], bool], ...] = (
    (attrgetter("place", "lineage"), False),
    (attrgetter("lineage"), False),
    (attrgetter("place"), False),
    (attrgetter("near"), True),
)


def name_ops(graph_module: GraphModule, found: Sequence[tuple[Node, Op]]) -> None:
    """Give ops their names: those that they have in the graphs known already, or what they are called by and a number.

    An op that these graphs lack gets another name than theirs, and so modules of its own.
    """
    known: list[dict[str, _Signs]] = [graph.meta.get(_NAMED, {}) for graph in graph_module.meta.get(KNOWN, [])]
    lineages = _Lineages(graph_module)
    signs = [lineages.signs(node, op) for node, op in found]
    names = _known_names(signs, known, by_form=TRAINED in graph_module.meta)
    taken = set[str]().union(*known)
    for number, (_, op) in enumerate(found):
        op.name = names[number] if number in names else unique(op.name, taken)
        taken.add(op.name)
    graph_module.meta[_NAMED] = {op.name: sign for (_, op), sign in zip(found, signs, strict=True)}


def _known_names(ops: Sequence[_Signs], known: Sequence[Mapping[str, _Signs]], *, by_form: bool) -> dict[int, str]:
    """The names of the ops, by their numbers, that are found among those of other graphs.

    ``by_form``: an op has the name of one in the first of these graphs only if both have one form. The graph of
    evaluation shares modules that compute with that of training, not only those that measure.
    """
    names: dict[int, str] = {}
    for (sign, as_many), graph in product(_BY_CERTAINTY, known):
        ours, theirs = defaultdict[Hashable, list[int]](list), defaultdict[Hashable, list[str]](list)
        for number, op in enumerate(ops):
            if number not in names:
                ours[op.base, sign(op), by_form and op.form].append(number)
        used = set(names.values())
        for name, op in graph.items():
            if name not in used:
                theirs[op.base, sign(op), by_form and known[0].get(name, op).form].append(name)
        for key, numbers in ours.items():
            if not as_many or len(numbers) == len(theirs[key]):
                names |= zip(numbers, theirs[key], strict=False)
    return names


class _Lineages:
    """How the values of a graph are computed, as a number each: values that are computed alike have the same.

    Dropout is passed over, as evaluation leaves it out.
    """

    def __init__(self, graph_module: GraphModule) -> None:
        self._graph_module = graph_module
        named = chain(graph_module.named_modules(remove_duplicate=False), graph_module.named_parameters())
        self._owners = {path for path, _ in named}
        self._numbers: dict[Node, int] = {}
        for node in graph_module.graph.nodes:
            self._numbers[node] = self._number(node, self._numbers.__getitem__)

    def signs(self, node: Node, op: Op) -> _Signs:
        """The signs of an op that has no number in its name yet."""
        arithmetic = arithmetic_of(node)
        static = None if isinstance(arithmetic, str) else arithmetic.bind(node.args, node.kwargs).static
        near = 0 if op.name in self._owners else self._near(node, _NEAR)
        return _Signs(op.name, repr((op.kind, arithmetic, static)), node.meta.get(PLACE, 0), self._numbers[node], near)

    def _near(self, node: Node, depth: int) -> int:
        return self._number(node, lambda source: self._near(source, depth - 1)) if depth else 0

    def _number(self, node: Node, of: Callable[[Node], int]) -> int:
        while "drop" in (called := self._called(node)).lower() and node.args and isinstance(node.args[0], Node):
            node = node.args[0]
        target = str(node.target)
        name = called if node.op == "call_function" else "" if target.startswith(f"{NAMESPACE}.constants.") else target
        args: list[Any] = []
        map_aggregate((node.args, node.kwargs), args.append)
        numbers = (of(arg) if isinstance(arg, Node) else repr(arg) for arg in args if not isinstance(arg, bool))
        return hash((node.op, name, *numbers))

    def _called(self, node: Node) -> str:
        owner = owner_module(self._graph_module, node)
        return function_name(node) if owner is None else type(owner).__name__
