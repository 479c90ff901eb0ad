"""Quantize every op that is not float: its activations, its weight and its output gradient."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fractrain_fx.capture import put_first
from fractrain_fx.config import FracConfig, Recipe
from fractrain_fx.errors import PassError
from fractrain_fx.formats import Format
from fractrain_fx.kernels.formats import format_by_kernels
from fractrain_fx.nn.bits import StageBits, WidthTable
from fractrain_fx.nn.needed_bits import MeasuringGradientQuantizer
from fractrain_fx.nn.quantized_leaf import QuantizedLeaf
from fractrain_fx.nn.quantizers import (
    ActivationQuantizer,
    GradientQuantizer,
    MixedActivationQuantizer,
    MixedGradientQuantizer,
    WeightQuantizer,
)
from fractrain_fx.nn.rounding import NoiseSeed
from fractrain_fx.passes.graph.aliases import Writes
from fractrain_fx.passes.graph.contractions import OPAQUE_KINDS, contraction, operand, set_operand
from fractrain_fx.passes.graph.edit import (
    NAMESPACE,
    call,
    gradient_path,
    identifier,
    insert_module,
    read,
    unique,
    varying,
)
from fractrain_fx.passes.graph.facts import KNOWN, Op, Role, choices_of, facts, ops_of

__all__ = ["Quantize"]

_PATHS = "quantizers"
"""Key of a graph's ``meta``: the path of the quantizer of each op's ``input`` and ``other`` operand."""


@dataclass(frozen=True)
class _Bits:
    """The nodes that give an op's bits: one width for all samples, or a block's choice."""

    fw: Node
    bw: Node
    weight: Node
    choice: Node | None = None


class Quantize(PassBase):
    """Put a quantize node on each operand and on the output of every op whose precision is not float.

    Weights are quantized as graph values, so parameters keep their names. Ops that read one tensor at the same bits
    share its quantize node, unless code writes into the tensor between them.

    Args:
        config: the model's configuration.
        fmt: a number format to use instead of the one that the configuration names.

    Requires: decided precisions, and a choice node for each gated block. Ensures: no such op reads a float operand.
    """

    def __init__(self, config: FracConfig, fmt: Format | None = None) -> None:
        super().__init__()
        self.config = config
        self.fmt = fmt or format_by_kernels(config, config.format, config.product_recipe)

    def requires(self, graph_module: GraphModule) -> None:
        choices = choices_of(graph_module.graph)
        for _, op in ops_of(graph_module.graph):
            if op.precision.mode == "gated" and op.block not in choices:
                raise PassError(f"op {op.name!r} is gated but block {op.block!r} has no gate: run InsertGates first")

    def call(self, graph_module: GraphModule) -> PassResult:
        ops = [
            (node, op)
            for node, op in ops_of(graph_module.graph)
            if op.precision.mode != "float" or op.kind in OPAQUE_KINDS
        ]
        if not ops or self.config.method == "float":
            return PassResult(graph_module, False)
        writer = _Writer(graph_module, self.config, self.fmt)
        for node, op in ops:
            if op.kind in OPAQUE_KINDS:
                writer.quantize_inside(node, op)
            elif op.precision.mode != "uncounted":
                writer.quantize(node, op)
        graph_module.graph.lint()
        return PassResult(graph_module, True)

    def ensures(self, graph_module: GraphModule) -> None:
        for node, op in ops_of(graph_module.graph):
            family = contraction(node)
            if op.precision.mode in ("float", "uncounted") or family is None:
                continue
            for place in family.operands:
                if facts(operand(node, place)).role not in ("input", "weight"):
                    raise PassError(f"an operand of {op.name!r} was left unquantized though it is {op.precision}")


class _Writer:
    """Writes the quantize nodes of one graph."""

    def __init__(self, graph_module: GraphModule, config: FracConfig, fmt: Format) -> None:
        self._graph_module = graph_module
        self._graph: Graph = graph_module.graph
        self._config = config
        self._format = fmt
        self._formats: dict[tuple[str, Recipe | None], Format] = {}
        self._choices = choices_of(self._graph)
        self._moving = varying(self._graph)
        self._writes = Writes(graph_module.graph)
        self._widths: dict[str, Node] = {}
        self._shared: dict[tuple[object, ...], Node] = {}
        known: list[GraphModule] = graph_module.meta.get(KNOWN, [])
        self._known = {key: path for graph in reversed(known) for key, path in graph.meta.get(_PATHS, {}).items()}
        self._paths: dict[tuple[str, str], str] = graph_module.meta.setdefault(_PATHS, {})
        self._first = next(node for node in self._graph.nodes if node.op != "placeholder")

    def quantize(self, node: Node, op: Op) -> None:
        family = contraction(node)
        if family is None:
            raise PassError(f"op {op.name!r} ({node.format_node()}) is not a contraction that can be quantized")
        bits = self._bits(op)
        for side, place in zip(("input", "other"), family.operands, strict=True):
            source = operand(node, place)
            if source in self._moving:
                replaced = self._activation(node, op, source, bits, side)
            else:
                channel = family.channel if side == "other" else family.first_channel
                replaced = self._weight(node, op, source, bits, channel, side)
            set_operand(node, place, replaced)
            self._paths[op.name, side] = str(replaced.target).removeprefix(f"{NAMESPACE}.")
        self._gradient(node, op, bits)

    def _format_of(self, op: Op) -> Format:
        """The format that the op's rule names, or that of all ops."""
        name, recipe = op.precision.format, op.precision.recipe
        if name is None:
            return self._format
        if (name, recipe) not in self._formats:
            self._formats[name, recipe] = format_by_kernels(self._config, name, recipe)
        return self._formats[name, recipe]

    def quantize_inside(self, node: Node, op: Op) -> None:
        """Round the weights of a module that is kept as one node; its activations are not rounded."""
        leaf = self._graph_module.get_submodule(str(node.target))
        path = f"opaque.{identifier(op.name)}"
        insert_module(self._graph_module, path, lambda: QuantizedLeaf(leaf, self._format))
        bits = self._stage("fw") if self._config.scheduled else self._width(self._config.gate_weight_bits)
        put_first(node, bits)
        node.target = f"{NAMESPACE}.{path}"

    def _seed(self) -> Node:
        if "noise" not in self._widths:
            insert_module(self._graph_module, "noise", NoiseSeed)
            with self._graph.inserting_before(self._first):
                self._widths["noise"] = call(self._graph, "noise", (), role="seed", owner="noise")
        return self._widths["noise"]

    def _stage(self, side: str) -> Node:
        self._know_stage()
        return self._read(f"stage.{side}")

    def _know_stage(self) -> None:
        insert_module(self._graph_module, "stage", lambda: StageBits(self._config.precision_stages[0]))

    def _staged(self, widths: Sequence[int]) -> Node:
        """A width that follows the stage."""
        self._know_stage()
        table = insert_module(self._graph_module, "widths", WidthTable)
        return self._read(f"widths.{table.add_staged(self._config.precision_stages, widths)}")

    def _bits(self, op: Op) -> _Bits:
        mode, precision = op.precision.mode, op.precision.precision
        if mode == "scheduled" and (stages := op.precision.stages) is not None:
            fw = self._staged([stage.fw for stage in stages])
            return _Bits(fw, self._staged([stage.bw for stage in stages]), fw)
        if mode == "scheduled":
            fixed = op.weight_bits(self._config)
            weight = self._stage("fw") if fixed is None else self._width(fixed)
            return _Bits(self._stage("fw"), self._stage("bw"), weight)
        if mode == "gated":
            weight = self._width(self._config.gate_weight_bits)
            return _Bits(weight, weight, weight, self._choices[op.block or ""])
        if precision is None:
            raise PassError(f"op {op.name!r} is {mode} but has no precision")
        return _Bits(self._width(precision.fw), self._width(precision.bw), self._width(precision.fw))

    def _width(self, bits: int) -> Node:
        table = insert_module(self._graph_module, "widths", WidthTable)
        return self._read(f"widths.{table.add(bits)}")

    def _read(self, path: str) -> Node:
        if path not in self._widths:
            with self._graph.inserting_before(self._first):
                self._widths[path] = read(self._graph, path, owner=path)
        return self._widths[path]

    def _activation(self, node: Node, op: Op, source: Node, bits: _Bits, side: str) -> Node:
        batch, fmt, keep = facts(source).batch, self._format_of(op), self._config.affine.keep
        key: tuple[object, ...] = ("activation", source, fmt)
        # A tensor that all samples share cannot follow one sample's choice: it has the width of gated weights.
        if bits.choice is None or batch is None:
            make: Callable[[], nn.Module] = partial(ActivationQuantizer, fmt, keep, batch)
            control = bits.fw
        else:
            widths, estimate = [option.fw for option in op.options(self._config)], self._config.gate.gradient
            # Ops that read the same values share a quantizer where their gains add up, as sums of first order do.
            key += (*widths, *((op.name, side) if estimate == "fisher" else ()))
            make, control = partial(MixedActivationQuantizer, fmt, widths, batch, keep, estimate), bits.choice
        return self._once((*key, control), node, self._path(op, side, side), make, [source, control], op)

    def _path(self, op: Op, side: str, name: str) -> str:
        """The path of an operand's quantizer: that of another graph, in which an op may share another one's.

        The op that reads the tensor first, and whose name the quantizer has, may be missing here. Tensors that are one
        there and two here have a quantizer each.
        """
        path = self._known.get((op.name, side), f"quant.{identifier(op.name)}.{name}")
        return unique(path, self._paths.values())

    def _weight(self, node: Node, op: Op, source: Node, bits: _Bits, channel: int, side: str) -> Node:
        ndim = len(facts(source).shape or ())
        dim = channel % ndim if ndim > 1 else None
        return self._once(
            ("weight", source.target if source.op == "get_attr" else source, self._format_of(op), bits.weight, dim),
            node,
            self._path(op, side, "weight"),
            lambda: WeightQuantizer(self._format_of(op), dim),
            [source, bits.weight],
            op,
        )

    def _once(
        self,
        key: tuple[object, ...],
        node: Node,
        path: str,
        make: Callable[[], nn.Module],
        args: Sequence[Node],
        op: Op,
    ) -> Node:
        role: Role = "weight" if key[0] == "weight" else "input"
        key = (*key, self._writes.last(args[0], node))
        if key not in self._shared:
            insert_module(self._graph_module, path, make)
            with self._graph.inserting_before(node):
                self._shared[key] = call(self._graph, path, args, role=role, owner=op.name, like=args[0])
        return self._shared[key]

    def _gradient(self, node: Node, op: Op, bits: _Bits) -> None:
        path, fmt = gradient_path(op), self._format_of(op)
        batch = facts(node).batch
        stream = zlib.crc32(op.name.encode())
        if bits.choice is not None and batch is not None:
            widths = [option.bw for option in op.options(self._config)]
            insert_module(self._graph_module, path, lambda: MixedGradientQuantizer(fmt, widths, batch, stream))
            arguments = [node, bits.choice, self._seed()]
        else:
            needed = self._config.affine.gradient_bits == "needed"
            kind = MeasuringGradientQuantizer if needed else GradientQuantizer
            insert_module(self._graph_module, path, lambda: kind(fmt, batch, stream))
            arguments = [node, bits.bw, self._seed()]
        users = list(node.users)
        with self._graph.inserting_after(node):
            quantized = call(self._graph, path, arguments, role="gradient", owner=op.name, like=node)
        # Ops that read the output next must not take it for a weight.
        self._moving.add(quantized)
        for user in users:
            user.replace_input_with(node, quantized)
