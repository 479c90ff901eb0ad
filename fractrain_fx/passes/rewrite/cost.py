"""Turn every op's MACs into a cost for each option, and insert one node that sums the cost of the choices."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fractrain_fx.config import FracConfig
from fractrain_fx.config.precision import FULL
from fractrain_fx.config.targets import Reach
from fractrain_fx.errors import PassError
from fractrain_fx.nn.bits import StageBits
from fractrain_fx.nn.cost import Backward, CostMeter, OpCost
from fractrain_fx.nn.needed_bits import MeasuringGradientQuantizer
from fractrain_fx.passes.graph.contractions import factors_of
from fractrain_fx.passes.graph.edit import NAMESPACE, call, gradient_path, insert_module, read, unique, varying
from fractrain_fx.passes.graph.facts import Op, blocks_of, choices_of, facts, ops_of

__all__ = ["MeterCost", "costed", "op_cost", "reach_of", "reachable"]

Paths = tuple[float, float, float]


class MeterCost(PassBase):
    """Add the cost node, and return its value beside the model's own output.

    Requires: decided precisions, and choices where blocks are gated. Ensures: the graph returns (output, cost).
    """

    def __init__(self, config: FracConfig) -> None:
        super().__init__()
        self.config = config

    def requires(self, graph_module: GraphModule) -> None:
        if any(facts(node).role == "cost" for node in graph_module.graph.nodes):
            raise PassError("the graph already returns its cost: MeterCost runs once on a graph")

    def call(self, graph_module: GraphModule) -> PassResult:
        graph = graph_module.graph
        choices = choices_of(graph)
        meter = self._meter(graph_module, list(choices))
        taken = [name for name, _ in getattr(graph_module, "frac", graph_module).named_children()]
        path = unique("cost", taken)
        insert_module(graph_module, path, lambda: meter)
        output = next(iter(graph.find_nodes(op="output")))
        with graph.inserting_before(output):
            shares = [read(graph, f"{each}.share", owner="model") for each in _measuring(graph_module)]
            arguments = [list(choices.values()), _stage_bits(graph), *([shares] if shares else [])]
            cost = call(graph, path, arguments, role="cost", owner="model")
        output.args = ((output.args[0], cost),)
        graph.lint()
        return PassResult(graph_module, True)

    def _meter(self, graph_module: GraphModule, gated_blocks: list[str]) -> CostMeter:
        tables = _tables(graph_module, self.config)
        scheduled, weighted, by_product, fixed, steered, total = ([0.0, 0.0, 0.0] for _ in range(6))
        own = any(op.precision.stages for _, op in ops_of(graph_module.graph))
        staged = {stage: [0.0, 0.0, 0.0] for stage in self.config.precision_stages} if own else {}
        backward = dict.fromkeys(_measuring(graph_module), Backward())
        for op, cost in costed(graph_module, self.config):
            mode = op.precision.mode
            if (path := gradient_path(op)) in backward:
                backward[path] = self._backward(op, cost)
            _accumulate(total, cost.macs)
            if mode in ("gated", "scheduled"):
                _accumulate(steered, cost.macs)
            if op.precision.stages is not None:
                for stage, spent in staged.items():
                    _accumulate(spent, cost.spent(op.precision.at(self.config, stage)))
            elif mode == "scheduled":
                alike = by_product if cost.by_product else scheduled
                _accumulate(weighted if self.config.gated and cost.weight else alike, cost.macs)
            elif mode != "gated":
                _accumulate(fixed, cost.spent(op.precision.precision or FULL))
        gated = {name: tables[name] for name in gated_blocks}
        bits, least, parts = self.config.gate_weight_bits, self.config.least_bits, [*backward.values()]
        return CostMeter(gated, steered, scheduled, fixed, total, weighted, bits, least, by_product, staged, parts)

    def _backward(self, op: Op, cost: OpCost) -> Backward:
        if op.precision.stages is not None:
            stages = {stage: op.precision.at(self.config, stage) for stage in self.config.precision_stages}
            return Backward(staged={stage: (0.0, *cost.spent(at)[1:]) for stage, at in stages.items()})
        if op.precision.mode == "scheduled":
            return Backward((0.0, *cost.macs[1:]))
        return Backward(fixed=(0.0, *cost.spent(op.precision.precision or FULL)[1:]))

    def refresh(self, graph_module: GraphModule) -> None:
        """Update the cost node of a graph after the backward products of its ops have changed."""
        for node in graph_module.graph.nodes:
            if facts(node).role == "cost":
                meter = graph_module.get_submodule(str(node.target))
                if isinstance(meter, CostMeter):
                    meter.follow(self._meter(graph_module, list(meter.blocks)))
                    for stage in (module for module in graph_module.modules() if isinstance(module, StageBits)):
                        meter.set(stage.known)

    def ensures(self, graph_module: GraphModule) -> None:
        returned = next(iter(graph_module.graph.find_nodes(op="output"))).args[0]
        if not (isinstance(returned, tuple) and isinstance(returned[1], Node) and facts(returned[1]).role == "cost"):
            raise PassError("the graph does not return its cost")


def op_cost(node: Node, op: Op, moving: set[Node], config: FracConfig) -> OpCost:
    """The MACs of an op's three products for one sample, whether it reads a weight, and its fewest bits."""
    factors = factors_of(node)
    role = None if factors is None else facts(factors[1]).role
    weight = (factors is None or factors[1] not in moving) if role is None else role == "weight"
    return OpCost(op.training_macs, weight, op.precision.least(config.least_bits), op.precision.by_product)


def reach_of(graph_module: GraphModule, config: FracConfig) -> Reach:
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
    return Reach((low, high), gated, full, spent)


def reachable(graph_module: GraphModule, config: FracConfig) -> tuple[float, float]:
    """The lowest and highest cp, in per cent, that the gates of a graph and its stages can choose."""
    return reach_of(graph_module, config).interval


def _tables(graph_module: GraphModule, config: FracConfig) -> dict[str, list[Paths]]:
    """For each gated block, the MACs spent on FW, EB and GC under each option."""
    tables: dict[str, list[list[float]]] = {}
    for op, cost in costed(graph_module, config):
        if op.precision.mode == "gated":
            rows = tables.setdefault(op.block or "", [[0.0, 0.0, 0.0] for _ in config.gate_options])
            options = config.projection_options if op.skip_path else config.gate_options
            for row, option in zip(rows, options, strict=True):
                _accumulate(row, cost.spent(option, config.gate_weight_bits))
    return {name: [(row[0], row[1], row[2]) for row in rows] for name, rows in tables.items()}


def costed(graph_module: GraphModule, config: FracConfig) -> list[tuple[Op, OpCost]]:
    """Every counted contraction of a graph, rewritten or not, with the cost of its products."""
    moving = varying(graph_module.graph)
    return [(op, op_cost(node, op, moving, config)) for node, op in ops_of(graph_module.graph) if op.macs is not None]


def _accumulate(total: list[float], more: Iterable[float]) -> None:
    for index, each in enumerate(more):
        total[index] += each


def _measuring(graph_module: GraphModule) -> list[str]:
    """The paths under ``frac`` of the quantizers that measure the bits that gradients need."""
    modules = getattr(graph_module, NAMESPACE, graph_module).named_modules()
    return [path for path, module in modules if isinstance(module, MeasuringGradientQuantizer)]


def _stage_bits(graph: Graph) -> tuple[Node, Node] | None:
    nodes = {str(node.target): node for node in graph.find_nodes(op="get_attr")}
    fw, bw = nodes.get("frac.stage.fw"), nodes.get("frac.stage.bw")
    return (fw, bw) if fw is not None and bw is not None else None
