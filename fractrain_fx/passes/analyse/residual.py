"""Find residual blocks: an add whose operands are a skip path and a branch from one common entry."""

from __future__ import annotations

import heapq
from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

import networkx as nx
from torch.fx import GraphModule, Node

from fractrain_fx.capture.targets import ADDS
from fractrain_fx.passes.analyse.linearity import activates, is_identity
from fractrain_fx.passes.graph.branches import is_sum
from fractrain_fx.passes.graph.contractions import function_name, operand
from fractrain_fx.passes.graph.edit import between, module_path, reached, varying
from fractrain_fx.passes.graph.facts import facts

__all__ = ["Residual", "residuals"]


@dataclass(frozen=True)
class Residual:
    """One residual block found in a graph, from the node at which skip path and branches start to the add, ``exit``.

    ``branches`` has each term of the sum besides the skip path, with the add that takes it: sums may be chained.
    ``region`` has every node of the branches and of the skip path, and the add. Nodes of a branch that the model reads
    elsewhere are left out: they run for samples that skip the block; ``whole`` says that there are none. The end of a
    branch may join other sums. ``projection`` has the nodes on the skip path, empty if the entry itself is added;
    ``path`` is the module whose forward issued the add.
    """

    entry: Node
    exit: Node
    skip: Literal["identity", "projection"]
    branches: tuple[tuple[Node, Node], ...]
    region: frozenset[Node]
    projection: frozenset[Node]
    path: str
    whole: bool = True


def residuals(graph_module: GraphModule) -> list[Residual]:
    """All residual blocks in order of their exit. No two overlap."""
    flow = _Flow(graph_module)
    blocks = [block for node in flow.order if (block := flow.residual(node)) is not None]
    return _disjoint(blocks)


class _Flow:
    """The paths along which activations flow, with their dominators."""

    def __init__(self, graph_module: GraphModule) -> None:
        self._graph_module = graph_module
        moving = varying(graph_module.graph)
        self.order = [node for node in graph_module.graph.nodes if node in moving and facts(node).flows]
        self._position = {node: index for index, node in enumerate(self.order)}
        start = object()
        paths: nx.DiGraph = nx.DiGraph()
        for node in self.order:
            sources = self._sources(node)
            paths.add_edges_from((source, node) for source in sources)
            if not sources:
                paths.add_edge(start, node)
        self._dominator = nx.immediate_dominators(paths, start) if self.order else {}

    def residual(self, add: Node) -> Residual | None:
        """The block that ends at an add, if it is one."""
        terms = self._terms(add)
        if terms is None:
            return self._from_learned(add)
        entry = next((node for node, _ in terms if self._feeds_all(node, terms)), None)
        if entry is not None:
            branches = [(node, user) for node, user in terms if node is not entry]
            return self._closed(entry, add, "identity", branches, projection=frozenset())
        if len(terms) != 2 or any(facts(node).shape != facts(add).shape for node, _ in terms):
            return None
        entry = self._last_common(terms[0][0], terms[1][0])
        if entry is None or facts(entry).shape is None:
            return None
        regions = [self._between(entry, node) for node, _ in terms]
        light = min((0, 1), key=lambda side: (self._macs(regions[side]), len(regions[side])))
        skip, branch = regions[light], regions[1 - light]
        # Without an activation on either side, two linear maps are added: an adapter (LoRA), or parts of one kernel.
        if activates(self._graph_module, skip) or not activates(self._graph_module, branch, pools=True):
            return None
        if not self._reads_only(entry, skip):
            return None
        identity = all(is_identity(self._graph_module, node) for node in skip)
        return self._closed(entry, add, "identity" if identity else "projection", [terms[1 - light]], projection=skip)

    def _from_learned(self, add: Node) -> Residual | None:
        """A block whose skip path carries a tensor that all samples share so far (CaiT's class token at first).

        The branch must be computed from that tensor too; a tensor to which position embeddings are added is not. The
        gate reads the activation that the shared tensor joins first.
        """
        if function_name(add) not in ADDS or facts(add).batch is None:
            return None
        pair = [operand(add, (0, "input")), operand(add, (1, "other"))]
        shared = [term for term in pair if isinstance(term, Node) and term not in self._position and facts(term).flows]
        branch = [term for term in pair if isinstance(term, Node) and term in self._position]
        if len(shared) != 1 or len(branch) != 1 or facts(shared[0]).shape != facts(add).shape:
            return None
        met = self._first_met(shared[0]) - {add}
        if not met:
            return None
        entry = self._dominator.get(min(met, key=self._position.__getitem__))
        if not isinstance(entry, Node) or facts(entry).shape is None or not self._between(entry, branch[0]) & met:
            return None
        return self._closed(entry, add, "identity", [(branch[0], add)], projection=frozenset())

    def _first_met(self, shared: Node) -> set[Node]:
        """Nodes at which a tensor that all samples share joins the flow."""
        apart = reached([shared], lambda node: [user for user in node.users if user not in self._position])
        return {user for node in apart for user in node.users if user in self._position}

    def _terms(self, add: Node) -> list[tuple[Node, Node]] | None:
        """The terms of a sum, each with the add that takes it. An add that only feeds this add is part of the sum."""
        if function_name(add) not in ADDS or facts(add).batch is None:
            return None
        pair = [operand(add, (0, "input")), operand(add, (1, "other"))]
        if not all(isinstance(term, Node) and term in self._position for term in pair):
            return None
        if pair[0] is pair[1] or not all(self._spreads(term, add) for term in pair):
            return None
        terms: list[tuple[Node, Node]] = []
        for term in pair:
            inner = self._terms(term) if self._only_feeds(term, add) else None
            terms += inner or [(term, add)]
        return terms

    def _spreads(self, node: Node, add: Node) -> bool:
        """Whether an operand has the shape of the sum, or has it but for dimensions of 1 besides the samples."""
        mine, sum_ = facts(node), facts(add)
        if mine.shape == sum_.shape:
            return True
        if mine.batch != sum_.batch or mine.shape is None or sum_.shape is None or len(mine.shape) != len(sum_.shape):
            return False
        return all(size in (1, full) for size, full in zip(mine.shape, sum_.shape, strict=True))

    def _only_feeds(self, node: Node, add: Node) -> bool:
        return all(user is add for user in node.users if user in self._position) and module_path(node) == module_path(
            add
        )

    def _feeds_all(self, entry: Node, terms: list[tuple[Node, Node]]) -> bool:
        """Whether all other terms are computed from this one."""
        others = [node for node, _ in terms if node is not entry]
        if any(facts(entry).shape != facts(add).shape for _, add in terms):
            return False
        return len(others) == len(terms) - 1 and all(self._between(entry, node) for node in others)

    def _last_common(self, first: Node, second: Node) -> Node | None:
        """The last node from which both are computed."""
        computed = {first: 1, second: 2}  # one bit for each of the two that are computed from a node
        queue = [(-self._position[node], node) for node in computed]
        heapq.heapify(queue)
        while queue:
            _, node = heapq.heappop(queue)
            if computed[node] == 3:
                return node
            for source in self._sources(node):
                if source not in computed:
                    heapq.heappush(queue, (-self._position[source], source))
                computed[source] = computed.get(source, 0) | computed[node]
        return None

    def _reads_only(self, entry: Node, region: frozenset[Node]) -> bool:
        """Whether no activation but the entry flows into a region."""
        return all(source is entry or source in region for node in region for source in self._sources(node))

    def _sources(self, node: Node) -> list[Node]:
        return [source for source in node.all_input_nodes if source in self._position]

    def _between(self, entry: Node, end: Node) -> frozenset[Node]:
        """Nodes on a path of activations from the entry to ``end``, ``end`` included and the entry not."""
        return frozenset(between(entry, end, self._sources))

    def _closed(
        self,
        entry: Node,
        add: Node,
        skip: Literal["identity", "projection"],
        branches: list[tuple[Node, Node]],
        projection: frozenset[Node],
    ) -> Residual | None:
        """The block, if its branches have a contraction that nothing outside the block needs."""
        inside, ends = self._between(entry, add), {node for node, _ in branches}
        region = self._needed_by(add, inside, ends)
        complete = region == inside
        if not (complete or (skip == "identity" and region >= projection | ends)):
            return None
        if not any(facts(node).op is not None for node in region - projection):
            return None
        whole = complete and self._needed_by(add, inside, set()) == inside
        return Residual(entry, add, skip, tuple(branches), region, projection, module_path(add), whole)

    def _needed_by(self, add: Node, inside: frozenset[Node], ends: Set[Node]) -> frozenset[Node]:
        """The add, and the nodes ``inside`` that are computed for it alone; ``ends`` may join other sums too."""
        needed = {add}
        for node in sorted(inside - {add}, key=self._position.__getitem__, reverse=True):
            users = [user for user in node.users if user in self._position and user not in needed]
            if not users or (node in ends and all(map(is_sum, users))):
                needed.add(node)
        return frozenset(needed)

    def _macs(self, region: frozenset[Node]) -> int:
        return sum(op.macs or 0 for node in region if (op := facts(node).op) is not None)


def _disjoint(blocks: list[Residual]) -> list[Residual]:
    """Settle overlaps: an outer block replaces inner blocks of the same module; otherwise the inner block stays.

    A block with a part that is needed elsewhere never takes the place of one without.
    """
    chosen: list[Residual] = []
    for block in sorted(blocks, key=lambda residual: (not residual.whole, len(residual.region))):
        rivals = [other for other in chosen if other.region & block.region]
        if not rivals:
            chosen.append(block)
        elif block.whole and all(other.region < block.region and other.path == block.path for other in rivals):
            chosen = [other for other in chosen if other not in rivals] + [block]
    return [block for block in blocks if block in chosen]
