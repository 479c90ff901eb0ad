"""Let fused ops multiply integer codes if that takes less time, in the copy of the graph that runs."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fractrain_fx.config import CODE_BITS, FracConfig
from fractrain_fx.errors import PassError
from fractrain_fx.execution.codes.choice import Int8Choice
from fractrain_fx.execution.codes.layout import Convolved, Features, Layout
from fractrain_fx.execution.codes.timing import Tuner
from fractrain_fx.execution.fused_op import FusedOp
from fractrain_fx.execution.simulated.arithmetic import AddMatMul, Arithmetic, Convolution, Linear, MatMul
from fractrain_fx.nn.quantizers import WeightQuantizer
from fractrain_fx.passes.execute.fuse import fused_ops, require_fused
from fractrain_fx.passes.execute.left_out import left_out
from fractrain_fx.passes.graph.edit import owner_module
from fractrain_fx.passes.graph.facts import Op, facts, ops_of

__all__ = ["UseInt8", "not_on_int8"]


class UseInt8(PassBase):
    """Give an int8 form to each fused op that multiplies an activation by a weight of at most 8 bits.

    :class:`Int8Choice` decides at each call whether the int8 form runs; the values are the same. :func:`not_on_int8`
    names the ops without an int8 form.

    Requires: a graph after ``Fuse``. Ensures: nodes and parameters stay the same.

    Args:
        config: the model's configuration.
        tuner: chooses between float and int8.
    """

    def __init__(self, config: FracConfig, tuner: Tuner) -> None:
        super().__init__()
        self._config, self._tuner = config, tuner

    def requires(self, graph_module: GraphModule) -> None:
        require_fused(graph_module)

    def call(self, graph_module: GraphModule) -> PassResult:
        found = fused_ops(graph_module)
        ops = {op.name: op for _, op in ops_of(graph_module.graph)}
        for name, fused in found.items():
            layout = self._layout(fused, ops[name])
            fused.int8 = None if layout is None else Int8Choice(name, layout, self._tuner)
        return PassResult(graph_module, any(fused.int8 is not None for fused in found.values()))

    def _layout(self, fused: FusedOp, op: Op) -> Layout | None:
        plan = fused.plan
        codes = all(each.has_codes for each in (plan.first.fmt, plan.second.fmt, plan.fmt))
        if plan.first.weight or not plan.second.weight or not codes or _wide(op, self._config):
            return None
        if plan.second.frozen is not None:
            return None
        layout = _layout(plan.arithmetic, plan.static)
        return None if isinstance(layout, str) else layout

    def ensures(self, graph_module: GraphModule) -> None:
        for name, fused in fused_ops(graph_module).items():
            if fused.int8 is not None and not fused.plan.fmt.has_codes:
                raise PassError(f"{name!r} has no integer codes but has an int8 form")


def not_on_int8(graph_module: GraphModule, config: FracConfig) -> dict[str, str]:
    """By name, the quantized ops of a shown graph that always multiply in float, with the reason."""
    if not config.lowers:
        return {}

    def reason(node: Node, op: Op, arithmetic: Arithmetic, weight: Node) -> str | None:
        quantizer = owner_module(graph_module, weight)
        if isinstance(quantizer, WeightQuantizer) and quantizer.frozen is not None:
            return "its frozen weight is kept as codes, which are read as floats"
        if not isinstance(arithmetic, Convolution) and len(facts(weight).shape or ()) != 2:
            return "multiplies by a batch of matrices"
        layout = _layout(arithmetic, arithmetic.bind(node.args, node.kwargs).static)
        return layout if isinstance(layout, str) else _wide(op, config)

    return left_out(graph_module, reason)


def _layout(arithmetic: Arithmetic, static: tuple[Any, ...]) -> Layout | str:
    """The layout in which a contraction with a weight is one matrix product, or the reason there is none."""
    match arithmetic:
        case Linear():
            return Features()
        case MatMul():
            return Features(upright=True)
        case AddMatMul():
            return Features(upright=True) if static == (1, 1) else "scales its product or its added term"
        case Convolution(kernel, transposed):
            stride, padding, dilation, _, groups = static
            if transposed or groups != 1:
                return "is a transposed convolution" if transposed else "convolves groups of channels"
            return Convolved(kernel, tuple(stride), tuple(padding), tuple(dilation))
        case _:
            return "is not a plain matrix product"


def _wide(op: Op, config: FracConfig) -> str | None:
    """The reason the bits of an op do not fit codes of one byte; ``None`` if they do."""
    if op.precision.mode == "pinned":
        fw = [op.precision.precision.fw] if op.precision.precision else []
        weights = fw
    elif op.precision.mode == "gated":
        options = config.projection_options if op.skip_path else config.gate_options
        fw, weights = [option.fw for option in options], [config.gate_weight_bits]
    else:
        fw = [stage.fw for stage in config.precision_stages]
        weights = [config.gate_weight_bits] if config.gated else fw
    if not any(bits <= CODE_BITS for bits in weights):
        return f"its weight has {min(weights)} bits, more than {CODE_BITS}"
    if not any(0 < bits <= CODE_BITS for bits in fw):
        return f"its activation has more than {CODE_BITS} bits"
    return None
