"""Choose what may compute each fused op, best first, and say why the quicker backends cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fractrain_fx.config import CODE_BITS, FracConfig, Precision
from fractrain_fx.errors import ModelError
from fractrain_fx.execution.arithmetic import AddMatMul, Arithmetic, Convolution, Linear, MatMul
from fractrain_fx.execution.backends.codes import CodedProducts
from fractrain_fx.execution.backends.cuda import CUDA
from fractrain_fx.execution.backends.plain import PLAIN
from fractrain_fx.execution.backends.torchao import not_linear, torchao_backend
from fractrain_fx.execution.codes.layout import Convolved, Features, Layout
from fractrain_fx.execution.codes.timing import Tuner
from fractrain_fx.execution.fused_op import FusedOp
from fractrain_fx.execution.plan import Backend, Plan
from fractrain_fx.execution.torchao_kernels import MULTIPLES
from fractrain_fx.nn.bits import OwnBits, StageBits
from fractrain_fx.nn.quantizers import WeightQuantizer
from fractrain_fx.passes.execute.fuse import fused_ops, require_fused, unfused
from fractrain_fx.passes.graph.arithmetic import arithmetic_of
from fractrain_fx.passes.graph.contractions import OPAQUE_KINDS, factors_of
from fractrain_fx.passes.graph.edit import NAMESPACE, owner_module, varying
from fractrain_fx.passes.graph.facts import Op, facts, ops_of

__all__ = ["ChooseBackend", "not_on_int8", "not_on_torchao"]


class ChooseBackend(PassBase):
    """Give each fused op the backends that may compute it, best first.

    At each call the first that does not refuse it does. ``codes`` is for activations times weights of at most 8 bits,
    if the configuration asks for it (:func:`not_on_int8` names the other ops), ``cuda`` for formats whose Triton
    kernels the model calls, and ``plain`` for all. ``torchao`` is for linear layers with ``run.torchao``
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
        modules = fused_ops(graph_module)
        apart = not_on_int8(graph_module, self._config)
        for name, fused in modules.items():
            coded = self._config.may_use_codes and name not in apart
            fused.backends = self._backends(name, fused.plan, coded)
        if self._config.run.torchao:
            self._give_to_torchao(graph_module, modules)
        return PassResult(graph_module, bool(modules))

    def _backends(self, name: str, plan: Plan, coded: bool) -> tuple[Backend, ...]:
        in_float: tuple[Backend, ...] = (CUDA, PLAIN) if plan.has_kernels("cuda") else (PLAIN,)
        if not coded:
            return in_float
        layout = _layout(plan.arithmetic, plan.static)
        assert not isinstance(layout, str)
        return CodedProducts(name, layout, self._tuner), *in_float

    def _give_to_torchao(self, graph_module: GraphModule, modules: dict[str, FusedOp]) -> None:
        apart = not_on_torchao(graph_module, self._config)
        taken = [name for name in modules if name not in apart]
        if modules and not taken:
            raise ModelError(
                "run.torchao=True would change nothing: no quantized op of this model is a linear layer that "
                "torchao can compute (plan(model, ...) gives each reason); leave it out"
            )
        backend = torchao_backend()
        ops = {op.name: op for _, op in ops_of(graph_module.graph)}
        for name in taken:
            fused, decision = modules[name], ops[name].precision
            pinned = decision.precision
            stage = graph_module.get_submodule(f"{NAMESPACE}.stage") if pinned is None else pinned
            assert isinstance(stage, StageBits | Precision)
            by_stage = dict(zip(self._config.precision_stages, decision.stages or (), strict=False))
            fused.knows(OwnBits(stage, by_stage) if by_stage and isinstance(stage, StageBits) else stage)
            fused.backends = (backend, *fused.backends)


class _WeightProduct(NamedTuple):
    """A quantized op that multiplies an activation by a weight, whose sizes are ``shape``.

    ``static`` has the arguments that are not tensors; ``quantizer`` is ``None`` before the pass ``Quantize``.
    """

    op: Op
    arithmetic: Arithmetic
    static: tuple[Any, ...]
    shape: tuple[int, ...]
    quantizer: WeightQuantizer | None


def not_on_int8(graph_module: GraphModule, config: FracConfig) -> dict[str, str]:
    """By name, the quantized ops of a graph, shown or running, that always multiply in float, with the reason."""
    if not config.may_use_codes:
        return {}

    def reason(product: _WeightProduct) -> str | None:
        if product.quantizer is not None and not product.quantizer.fmt.has_codes:
            return "its format has no codes"
        if product.quantizer is not None and product.quantizer.frozen is not None:
            return "its frozen weight is kept as codes, which are read as floats"
        if not isinstance(product.arithmetic, Convolution) and len(product.shape) != 2:
            return "multiplies by a batch of matrices"
        layout = _layout(product.arithmetic, product.static)
        return layout if isinstance(layout, str) else _wide(product.op, config)

    return _left_out(graph_module, reason)


def not_on_torchao(graph_module: GraphModule, config: FracConfig) -> dict[str, str]:
    """By name, the quantized ops of a graph, shown or running, that torchao never computes, with the reason."""
    if not config.run.torchao:
        return {}

    def reason(product: _WeightProduct) -> str | None:
        return not_linear(product.arithmetic, product.static) or _misfit(product.shape, product.op, config)

    return _left_out(graph_module, reason)


def _left_out(graph_module: GraphModule, reason: Callable[[_WeightProduct], str | None]) -> dict[str, str]:
    """By name, the quantized ops that are not a fused activation times a weight, or that ``reason`` leaves out."""
    moving = varying(graph_module.graph)
    apart = unfused(graph_module)
    reasons: dict[str, str] = {}
    for node, op in ops_of(graph_module.graph):
        if op.precision.rounds:
            product = apart.get(op.name) or _product(graph_module, node, op, moving)
            why = product if isinstance(product, str) else reason(product)
            if why is not None:
                reasons[op.name] = why
    return reasons


def _product(graph_module: GraphModule, node: Node, op: Op, moving: set[Node]) -> _WeightProduct | str:
    """The product of an op, or the reason that it is not one of an activation and a weight."""
    factors = factors_of(node)
    if op.kind in OPAQUE_KINDS or factors is None:
        return "is kept as one node"
    first, weight = factors
    if first not in moving:
        return "its first factor is the weight"
    if weight in moving:
        return "multiplies two activations"
    shape, fused = facts(weight).shape or (), owner_module(graph_module, node)
    if isinstance(fused, FusedOp):
        return _WeightProduct(op, fused.plan.arithmetic, fused.plan.static, shape, fused.plan.second.quantizer)
    arithmetic, quantizer = arithmetic_of(node), owner_module(graph_module, weight)
    if isinstance(arithmetic, str):
        return arithmetic
    static = arithmetic.bind(node.args, node.kwargs).static
    return _WeightProduct(op, arithmetic, static, shape, quantizer if isinstance(quantizer, WeightQuantizer) else None)


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
    fw, fixed = [option.fw for option in op.options(config)], op.weight_bits(config)
    weights = fw if fixed is None else [fixed]
    if not any(bits <= CODE_BITS for bits in weights):
        return f"its weight has {min(weights)} bits, more than {CODE_BITS}"
    if not any(0 < bits <= CODE_BITS for bits in fw):
        return f"its activation has more than {CODE_BITS} bits"
    return None


def _misfit(sizes: Sequence[int], op: Op, config: FracConfig) -> str | None:
    """The reason that torchao cannot multiply by a weight of these sizes; ``None`` if it can."""
    if len(sizes) != 2:
        return "multiplies by a batch of matrices"
    recipe = op.precision.recipe_under(config)
    for name in () if recipe is None else dict.fromkeys(recipe.formats):
        multiple = MULTIPLES.get(name, 1)
        if any(size % multiple for size in sizes):
            size = "x".join(map(str, sizes))
            return f"its weight is {size}, and {name} by torchao takes multiples of {multiple} only"
    return None
