"""Turn every op's MACs into a cost for each option, and insert one node that sums the cost of the choices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fractrain_fx.config import FracConfig
from fractrain_fx.config.targets import CostReach
from fractrain_fx.errors import PassError
from fractrain_fx.nn.cost import CostMeter, CostRow, OpCost
from fractrain_fx.nn.needed_bits import MeasuringGradientQuantizer
from fractrain_fx.passes.graph.contractions import factors_of
from fractrain_fx.passes.graph.edit import NAMESPACE, call, gradient_path, insert_module, read, unique, varying
from fractrain_fx.passes.graph.facts import Op, blocks_of, choices_of, facts, ops_of

__all__ = ["MeterCost", "costed", "reach_of"]

Paths = tuple[float, float, float]


class _Row(NamedTuple):
    """The properties that all ops of a row of the meter share.

    ``bits`` are the nodes that hold the bits of both factors and of the gradient; ``least``, ``by_product`` and
    ``steered`` are those of :class:`CostRow`. ``measured`` is the quantizer that measures the bits that gradients need,
    which no other op has.
    """

    bits: tuple[Node, Node, Node]
    least: tuple[int, int, int]
    by_product: bool
    steered: bool
    measured: str | None


class MeterCost(PassBase):
    """Add the cost node, and return its value beside the model's own output.

    Requires: decided precisions, choices where blocks are gated, and rounded operands of ops that are not float.
    Ensures: the graph returns (output, cost).
    """

    def __init__(self, config: FracConfig) -> None:
        super().__init__()
        self.config = config

    def requires(self, graph_module: GraphModule) -> None:
        if any(facts(node).role == "cost" for node in graph_module.graph.nodes):
            raise PassError("the graph already returns its cost: MeterCost runs once on a graph")
        for node, op in ops_of(graph_module.graph):
            if op.precision.rounds and _bits(node) is None:
                raise PassError(f"op {op.name!r} is {op.precision.mode} but nothing rounds it: run Quantize first")

    def call(self, graph_module: GraphModule) -> PassResult:
        graph = graph_module.graph
        choices = choices_of(graph)
        meter, rows = self._meter(graph_module, list(choices))
        taken = [name for name, _ in getattr(graph_module, "frac", graph_module).named_children()]
        path = unique("cost", taken)
        insert_module(graph_module, path, lambda: meter)
        output = next(iter(graph.find_nodes(op="output")))
        arguments: list[Any] = [list(choices.values()), _bits_of(rows)]
        with graph.inserting_before(output):
            shares = [
                None if row.measured is None else read(graph, f"{row.measured}.share", owner="model") for row in rows
            ]
            if any(row.measured for row in rows):
                arguments.append(shares)
            cost = call(graph, path, arguments, role="cost", owner="model")
        output.args = ((output.args[0], cost),)
        graph.lint()
        return PassResult(graph_module, True)

    def _meter(self, graph_module: GraphModule, gated_blocks: Sequence[str]) -> tuple[CostMeter, list[_Row]]:
        """The meter of a graph, and the properties of the ops of each of its rows."""
        measured = _measuring(graph_module)
        full, fixed, total = ([0.0, 0.0, 0.0] for _ in range(3))
        rows: dict[_Row, list[float]] = {}
        for node, op, cost in _costed(graph_module, self.config):
            mode = op.precision.mode
            _accumulate(total, cost.macs)
            if mode in ("gated", "scheduled"):
                _accumulate(full, cost.macs)
            if mode == "gated":
                continue
            bits = _bits(node)
            if bits is None:
                _accumulate(fixed, cost.macs)
                continue
            # Two activations have the forward bits, also where the first operand is a weight.
            bits = bits if cost.weight else (bits[1], bits[1], bits[2])
            path = gradient_path(op)
            row = _Row(bits, cost.least, cost.by_product, mode == "scheduled", path if path in measured else None)
            _accumulate(rows.setdefault(row, [0.0, 0.0, 0.0]), cost.macs)
        tables = _tables(graph_module, self.config)
        places = {node: place for place, node in enumerate(_bits_of(rows))}
        parts = [
            CostRow(
                (fw, eb, gc),
                (places[row.bits[0]], places[row.bits[1]], places[row.bits[2]]),
                row.least,
                row.by_product,
                row.steered,
            )
            for row, (fw, eb, gc) in rows.items()
        ]
        return CostMeter({name: tables[name] for name in gated_blocks}, full, fixed, total, parts), list(rows)

    def refresh(self, graph_module: GraphModule) -> None:
        """Update the cost node of a graph after the backward products of its ops have changed."""
        for node in graph_module.graph.nodes:
            if facts(node).role == "cost":
                meter = graph_module.get_submodule(str(node.target))
                if isinstance(meter, CostMeter):
                    meter.follow(self.meter(graph_module, meter.blocks))

    def meter(self, graph_module: GraphModule, blocks: Sequence[str]) -> CostMeter:
        """A meter of the ops of a graph as they are now, whose gated ``blocks`` come in this order."""
        return self._meter(graph_module, blocks)[0]


def _op_cost(node: Node, op: Op, moving: set[Node], config: FracConfig) -> OpCost:
    """The MACs of an op's three products for one sample, whether it reads a weight, and its fewest bits."""
    factors = factors_of(node)
    role = None if factors is None else facts(factors[1]).role
    weight = (factors is None or factors[1] not in moving) if role is None else role == "weight"
    recipe = op.precision.recipe_under(config)
    if recipe is None:
        return OpCost(op.training_macs, weight)
    return OpCost(op.training_macs, weight, recipe.least, recipe.by_product)


def reach_of(graph_module: GraphModule, config: FracConfig) -> CostReach:
    """What the gates of a graph can choose, and what its scheduled ops cost."""
    gated = full = low = high = 0.0
    scheduled: list[OpCost] = []
    for op, cost in costed(graph_module, config):
        gated += sum(cost.macs) if op.precision.mode == "gated" else 0
        full += sum(cost.macs) if op.precision.mode in ("gated", "scheduled") else 0
        scheduled += [cost] if op.precision.mode == "scheduled" else []
    skippable = {block.name for block in blocks_of(graph_module.graph) if block.skip is not None}
    for name, table in _tables(graph_module, config).items():
        usable = [
            sum(paths)
            for option, paths in zip(config.gate_options, table, strict=True)
            if name in skippable or not option.skips
        ]
        low, high = low + min(usable), high + max(usable)
    spent = {
        option: sum(sum(cost.spent(option, config.gate_weight_bits)) for cost in scheduled)
        for option in config.precision_stages
    }
    return CostReach((low, high), gated, full, spent)


def _tables(graph_module: GraphModule, config: FracConfig) -> dict[str, list[Paths]]:
    """For each gated block, the MACs spent on FW, EB and GC under each option."""
    tables: dict[str, list[list[float]]] = {}
    for op, cost in costed(graph_module, config):
        if op.precision.mode == "gated":
            rows = tables.setdefault(op.block or "", [[0.0, 0.0, 0.0] for _ in config.gate_options])
            for row, option in zip(rows, op.options(config), strict=True):
                _accumulate(row, cost.spent(option, op.weight_bits(config)))
    return {name: [(row[0], row[1], row[2]) for row in rows] for name, rows in tables.items()}


def costed(graph_module: GraphModule, config: FracConfig) -> list[tuple[Op, OpCost]]:
    """Every counted contraction of a graph, rewritten or not, with the cost of its products."""
    return [(op, cost) for _, op, cost in _costed(graph_module, config)]


def _costed(graph_module: GraphModule, config: FracConfig) -> Iterator[tuple[Node, Op, OpCost]]:
    moving = varying(graph_module.graph)
    for node, op in ops_of(graph_module.graph):
        if op.macs is not None:
            yield node, op, _op_cost(node, op, moving, config)


def _bits(node: Node) -> tuple[Node, Node, Node] | None:
    """The nodes that give the bits of a contraction's two factors and of its gradient; ``None`` if it is float."""
    if facts(node).role == "fused":
        return cast("tuple[Node, Node, Node]", node.args[0])
    factors = factors_of(node)
    gradient = next((user for user in node.users if facts(user).role == "gradient"), None)
    if factors is None or gradient is None:
        return None
    return cast("tuple[Node, Node, Node]", tuple(quantizer.args[1] for quantizer in (*factors, gradient)))


def _bits_of(rows: Iterable[_Row]) -> list[Node]:
    """The nodes that hold the bits of rows, each once."""
    return list(dict.fromkeys(node for row in rows for node in row.bits))


def _accumulate(total: list[float], more: Iterable[float]) -> None:
    for index, value in enumerate(more):
        total[index] += value


def _measuring(graph_module: GraphModule) -> set[str]:
    """The paths under ``frac`` of the quantizers that measure the bits that gradients need."""
    modules = getattr(graph_module, NAMESPACE, graph_module).named_modules()
    return {path for path, module in modules if isinstance(module, MeasuringGradientQuantizer)}
