"""Choose what may compute each fused op, best first, and say why the quicker backends cannot."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fractrain_fx.config import CODE_BITS, TORCHAO_PRECISION, FracConfig, Torchao
from fractrain_fx.errors import ModelError, PassError
from fractrain_fx.execution.arithmetic import AddMatMul, Arithmetic, Convolution, Linear, MatMul
from fractrain_fx.execution.backends.codes import CodedProducts
from fractrain_fx.execution.backends.cpu import CPU
from fractrain_fx.execution.backends.cuda import CUDA
from fractrain_fx.execution.backends.plain import PLAIN
from fractrain_fx.execution.backends.torchao import MULTIPLES, TorchaoLinear
from fractrain_fx.execution.codes.layout import Convolved, Features, Layout
from fractrain_fx.execution.codes.timing import Tuner
from fractrain_fx.execution.fused_op import FusedOp
from fractrain_fx.execution.plan import Backend, Plan
from fractrain_fx.nn.quantizers import WeightQuantizer
from fractrain_fx.passes.execute.fuse import fused_ops, require_fused
from fractrain_fx.passes.execute.left_out import left_out
from fractrain_fx.passes.graph.edit import owner_module
from fractrain_fx.passes.graph.facts import Op, facts, ops_of

__all__ = ["ChooseBackend", "not_on_int8", "not_on_torchao"]


class ChooseBackend(PassBase):
    """Give each fused op the backends that may compute it, best first.

    At each call the first that does not refuse it does. ``codes`` is for activations times weights of at most 8 bits,
    if the configuration asks for it (:func:`not_on_int8` names the other ops), ``cpu`` and ``cuda`` for formats whose
    kernels the model calls, and ``plain`` for all. With ``run.torchao`` torchao computes linear layers instead
    (:func:`not_on_torchao` names the other ops).

    Requires: a graph after ``Fuse``. Ensures: nodes and parameters stay the same; every op has a backend that never
    refuses.

    Args:
        config: the model's configuration.
        tuner: chooses between codes and float; a new one by default.

    Raises:
        ConfigError: torchao is asked for and not installed.
        ModelError: torchao is asked for and can compute no op of the graph.
    """

    def __init__(self, config: FracConfig, tuner: Tuner | None = None) -> None:
        super().__init__()
        self._config, self._tuner = config, tuner or Tuner.of(config)

    def requires(self, graph_module: GraphModule) -> None:
        require_fused(graph_module)

    def call(self, graph_module: GraphModule) -> PassResult:
        found = fused_ops(graph_module)
        ops = {op.name: op for _, op in ops_of(graph_module.graph)}
        for name, fused in found.items():
            fused.backends = self._backends(name, fused.plan, ops[name])
        if self._config.run.torchao is not None:
            self._set_layers(graph_module, self._config.run.torchao)
        return PassResult(graph_module, bool(found))

    def ensures(self, graph_module: GraphModule) -> None:
        for name, fused in fused_ops(graph_module).items():
            if fused.backends[-1] is not PLAIN:
                raise PassError(f"{name!r} has no backend that computes every call")
            if fused.layer is not None and fused.codes is not None:
                raise PassError(f"{name!r} was given both to torchao and to products of codes")

    def _backends(self, name: str, plan: Plan, op: Op) -> tuple[Backend, ...]:
        kernels = [backend for backend in (CPU, CUDA) if plan.has_kernels(backend.name)]
        in_float: tuple[Backend, ...] = (*kernels, PLAIN)
        layout = self._layout(plan, op) if self._config.may_use_codes else None
        if layout is None:
            return in_float
        return CodedProducts(name, layout, self._tuner, in_float[0]), *in_float

    def _layout(self, plan: Plan, op: Op) -> Layout | None:
        codes = all(each.has_codes for each in (plan.first.fmt, plan.second.fmt, plan.fmt))
        if plan.first.weight or not plan.second.weight or not codes or plan.second.frozen is not None:
            return None
        layout = None if _wide(op, self._config) else _layout(plan.arithmetic, plan.static)
        return None if isinstance(layout, str) else layout

    def _set_layers(self, graph_module: GraphModule, kind: Torchao) -> None:
        given = 0
        for node in graph_module.graph.find_nodes(op="call_module"):
            fused, op = graph_module.get_submodule(str(node.target)), facts(node).op
            if isinstance(fused, FusedOp) and op is not None:
                fused.layer = _layer(node, fused.plan, op, kind)
                given += fused.layer is not None
        quantized = any(facts(node).role in ("fused", "gradient") for node in graph_module.graph.nodes)
        if quantized and not given:
            raise ModelError(
                f"run.torchao={kind!r} would change nothing: no quantized op of this model is a linear layer that "
                "torchao can compute (plan(model, ...) gives each reason); use run.torchao=None"
            )


def not_on_int8(graph_module: GraphModule, config: FracConfig) -> dict[str, str]:
    """By name, the quantized ops of a shown graph that always multiply in float, with the reason."""
    if not config.may_use_codes:
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


def not_on_torchao(graph_module: GraphModule, config: FracConfig) -> dict[str, str]:
    """By name, the quantized ops of a shown graph that torchao does not compute, with the reason."""
    if config.run.torchao is None:
        return {}
    kind = config.run.torchao

    def reason(node: Node, op: Op, arithmetic: Arithmetic, weight: Node) -> str | None:
        fused = node.op == "call_module"
        added = node.kwargs["added"] if fused else arithmetic.bind(node.args, node.kwargs).added
        return _not_torchaos(arithmetic, op, weight, added if isinstance(added, Node) else None, kind)

    return left_out(graph_module, reason)


def _layout(arithmetic: Arithmetic, static: tuple[Any, ...]) -> Layout | str:
    """The layout in which a contraction with a weight is one product of rows, or the reason there is none."""
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


def _layer(node: Node, plan: Plan, op: Op, kind: Torchao) -> TorchaoLinear | None:
    """The layer of torchao that computes a fused op, if there is one."""
    weight, added = node.kwargs["b"], node.kwargs["added"]
    if plan.first.weight or not plan.second.weight or not isinstance(weight, Node):
        return None
    bias = added if isinstance(added, Node) else None
    if _not_torchaos(plan.arithmetic, op, weight, bias, kind) is not None:
        return None
    outputs, inputs = facts(weight).shape or ()
    return TorchaoLinear(kind, inputs, outputs, bias is not None)


def _not_torchaos(arithmetic: Arithmetic, op: Op, weight: Node, bias: Node | None, kind: Torchao) -> str | None:
    """The reason torchao does not compute an activation times a weight; ``None`` if it does."""
    if not isinstance(arithmetic, Linear):
        return "is not a linear layer, and torchao computes only those"
    pinned = op.precision.precision
    if op.precision.format is not None:
        return f"is pinned to format {op.precision.format!r}, and torchao computes in its own"
    if pinned not in (None, TORCHAO_PRECISION):
        return f"is pinned to {pinned}, and torchao computes at {TORCHAO_PRECISION}"
    sizes = facts(weight).shape or ()
    if bias is not None and facts(bias).shape != sizes[:1]:
        return "adds something else than one number for each channel"
    multiple = MULTIPLES.get(kind, 1)
    if any(size % multiple for size in sizes):
        return f"its weight is {'x'.join(map(str, sizes))}, and {kind} takes multiples of {multiple} only"
    return None
