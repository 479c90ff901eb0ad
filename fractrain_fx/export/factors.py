"""Read from an evaluation graph how each product rounds its two factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fractrain_fx.config.precision import FLOAT_BITS, Precision
from fractrain_fx.errors import ExportError
from fractrain_fx.execution.fused_op import FusedOp
from fractrain_fx.execution.roundings import forward_operands
from fractrain_fx.export.rounding import FrozenRounding, LevelsName, WeightRounding, integer_range
from fractrain_fx.formats import Format, Operand, ValueRange
from fractrain_fx.nn.bits import WidthTable
from fractrain_fx.nn.quantizers import ActivationQuantizer, WeightQuantizer
from fractrain_fx.passes import facts, ops_of
from fractrain_fx.passes.graph.contractions import OPAQUE_KINDS, contraction, operand
from fractrain_fx.passes.graph.facts import Op

__all__ = ["Choices", "FrozenFactor", "FrozenOp", "frozen_ops"]

Choices = Mapping[str, int] | Precision | None
"""Instead of gates: the number of the option of each block, or one precision for every op that the stage steers."""


@dataclass(frozen=True)
class FrozenFactor:
    """One factor of a product, and how it is rounded.

    Attributes:
        fmt: the number format.
        bits: of the values; 32 for a factor that is not rounded.
        source: the node of the unrounded values.
        quantizer: rounds them in training.
        within: the range, where it is fixed; for a weight that of each output channel.
        of: the operand of the forward product, for a format that rounds anew for each product.
        parameter: the path of the parameter, if it is one.
        value: the tensor that the node reads; ``None`` for values that the graph computes.
        levels: those of format ``affine``.
    """

    fmt: Format
    bits: int
    source: Node
    quantizer: ActivationQuantizer | WeightQuantizer
    within: ValueRange | None = None
    of: Operand | None = None
    parameter: str | None = None
    value: Tensor | None = None
    levels: LevelsName = "exact"

    @property
    def weight(self) -> bool:
        """Whether it is a weight."""
        return isinstance(self.quantizer, WeightQuantizer)

    @property
    def is_rounded(self) -> bool:
        """Whether it is rounded at all."""
        return self.bits != FLOAT_BITS

    def rounding(self) -> FrozenRounding:
        """A module that rounds the activation."""
        assert isinstance(self.quantizer, ActivationQuantizer)
        return FrozenRounding(self.fmt, self.bits, self.within, self.of, self.quantizer.axis, self.levels)

    @property
    def weight_rounding(self) -> WeightRounding:
        """How the weight is rounded."""
        assert isinstance(self.quantizer, WeightQuantizer)
        return WeightRounding(self.fmt, self.bits, self.of, self.quantizer.dim, self.levels)

    @torch.no_grad()
    def rounded_weight(self) -> Tensor:
        """The values of the weight after rounding."""
        assert self.value is not None
        w = self.value.detach()
        return (self.weight_rounding.rounded(w) if self.is_rounded else w).clone()


@dataclass(frozen=True)
class FrozenOp:
    """One product with both of its factors.

    Attributes:
        node: of the graph.
        op: its record.
        factors: the first and the second.
    """

    node: Node
    op: Op
    factors: tuple[FrozenFactor, FrozenFactor]

    @property
    def name(self) -> str:
        """The op's name."""
        return self.op.name

    @property
    def weight(self) -> FrozenFactor | None:
        """The factor that is a parameter, if one is."""
        return next((factor for factor in self.factors if factor.parameter is not None), None)

    @property
    def activation(self) -> FrozenFactor | None:
        """The factor beside a weight."""
        others = [factor for factor in self.factors if not factor.weight]
        return others[0] if len(others) == 1 else None


def frozen_ops(graph_module: GraphModule, choices: Choices, levels: LevelsName = "exact") -> list[FrozenOp]:
    """Every rounded product of an evaluation graph.

    Args:
        graph_module: the shown graph.
        choices: what takes the place of gates and of the present stage.
        levels: those of format ``affine``.

    Raises:
        ExportError: a gate chooses and ``choices`` has no option for its block, weights are kept as codes, or the
            forward product has a transform.
    """
    frozen = []
    for node, op in ops_of(graph_module.graph):
        if not op.precision.rounds:
            continue
        if op.kind in OPAQUE_KINDS:
            raise ExportError(
                f"{op.name} is a module whose inside was not recorded ({op.kind}), so its rounded weights have no "
                f"layer to stand in: leave it float with Pin({op.name!r}, format='float')"
            )
        module = graph_module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, FusedOp) and module.plan.fmt.recipe and module.plan.fmt.recipe.forward.hadamard:
            raise ExportError(
                f"{op.name} multiplies its values after a Hadamard transform, which no exported module has: train with "
                "a recipe without hadamard in the forward product, or leave the op float with "
                f"Pin({op.name!r}, format='float')"
            )
        fused = _fused(graph_module, node, module, choices) if isinstance(module, FusedOp) else None
        first, second = fused or _unfused(graph_module, node, choices)
        frozen.append(FrozenOp(node, op, (_settled(first, levels), _settled(second, levels))))
    return frozen


def _fused(graph_module: GraphModule, node: Node, module: FusedOp, choices: Choices) -> list[FrozenFactor]:
    controls: Any = node.args[0]
    sources = [node.kwargs["a"], node.kwargs["b"]]
    shapes = [facts(source).shape or () for source in sources]  # type: ignore[arg-type]
    a, b = (torch.empty(shape, device="meta") for shape in shapes)
    operands = forward_operands(module.plan, a, b)
    quantizers: Any = module._quantizers[:2]
    return [
        _factor(graph_module, source, quantizer, control, of, choices)  # type: ignore[arg-type]
        for source, quantizer, control, of in zip(sources, quantizers, controls, operands, strict=False)
    ]


def _unfused(graph_module: GraphModule, node: Node, choices: Choices) -> list[FrozenFactor]:
    family = contraction(node)
    assert family is not None  # the Quantize pass refuses others
    factors = []
    for place in family.operands:
        quantize: Node = operand(node, place)
        module: Any = graph_module.get_submodule(str(quantize.target))
        source, control = quantize.args[:2]
        factors.append(_factor(graph_module, source, module, control, None, choices))  # type: ignore[arg-type]
    return factors


def _factor(
    graph_module: GraphModule,
    source: Node,
    quantizer: ActivationQuantizer | WeightQuantizer,
    control: Node,
    of: Operand | None,
    choices: Choices,
) -> FrozenFactor:
    bits = _bits(graph_module, quantizer, control, choices)
    parameter = str(source.target) if source.op == "get_attr" else None
    value = attrgetter(str(source.target))(graph_module) if source.op == "get_attr" else None
    if isinstance(quantizer, WeightQuantizer):
        if quantizer.frozen is not None:
            raise ExportError(
                f"{parameter} is kept as codes (pack_frozen): call model.restore() first, which puts float values back"
            )
        within = None
    else:
        measured = of is not None or quantizer.fmt.by_sample
        within = None if measured else ValueRange(quantizer.range.lo, quantizer.range.span)
    weight = parameter if isinstance(quantizer, WeightQuantizer) and isinstance(value, nn.Parameter) else None
    return FrozenFactor(quantizer.fmt, bits, source, quantizer, within, of, weight, value)


def _bits(graph_module: GraphModule, quantizer: nn.Module, control: Node, choices: Choices) -> int:
    """The bits that a node gives, after choices have taken the place of gates and stage."""
    if control.op == "get_attr":
        path, _, name = str(control.target).rpartition(".")
        if isinstance(choices, Precision) and name == "fw":
            return choices.fw
        table = graph_module.get_submodule(path)
        if isinstance(choices, Precision) and isinstance(table, WidthTable):
            return table.width_at(name, choices)
        return int(attrgetter(str(control.target))(graph_module)) or FLOAT_BITS
    if isinstance(choices, Precision):
        return choices.fw
    block = facts(control).owner or ""
    if choices is None or block not in choices:
        raise ExportError(
            f"a gate chooses the precision of block {block!r} for each input, which no file holds: give "
            "stage=Precision(8, 8) for one precision in all blocks, or choices='commonest' with batches=[...], which "
            "fixes the option that these batches choose most often (fractrain export: --stage or --commonest)"
        )
    options: Any = quantizer.options
    # A skipped block is taken out of the graph; a projection on its skip path has an option that computes.
    return int(options[choices[block]]) or FLOAT_BITS


def _settled(factor: FrozenFactor, levels: LevelsName) -> FrozenFactor:
    """The factor with its levels, and with the range that they lie in if it is fixed."""
    within = factor.within
    if factor.fmt.name == "affine" and factor.is_rounded:
        factor = replace(factor, levels=levels)
    if factor.weight:
        within = None if factor.value is None else factor.weight_rounding.range_of(factor.value)
    elif within is not None and factor.levels == "integer":
        within = integer_range(within, factor.bits, weight=False)
    return replace(factor, within=within)
