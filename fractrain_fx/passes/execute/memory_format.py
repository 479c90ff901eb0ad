"""Let convolutions of images keep the channels innermost in memory, in the copy of the graph that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any, Literal

from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.nn.modules import activation, batchnorm, instancenorm, normalization, padding, pooling, upsampling
from torch.nn.modules.dropout import _DropoutNd

from fractrain_fx.execution.arithmetic import Convolution
from fractrain_fx.execution.blocks.maskless_relu import MasklessReLU
from fractrain_fx.execution.fused_op import FusedOp
from fractrain_fx.execution.plan import with_channels_last
from fractrain_fx.passes.execute.fuse import require_fused
from fractrain_fx.passes.graph.aliases import memory_of, written
from fractrain_fx.passes.graph.contractions import contraction, function_name, operand
from fractrain_fx.passes.graph.edit import owner_module
from fractrain_fx.passes.graph.facts import Role, facts

__all__ = ["ChannelsLast"]

Reading = Literal["any", "ends", "plain"]
"""How a node reads a tensor that may lie in another order than the model's author saw: in any order, and its result may
lie so too; in any order, with a result in the usual one; or only in the usual one."""

# Strided 1x1 convolutions of fewer channels than a vector of oneDNN write past its memory in backward if the channels
# are innermost (oneDNN issue 6035).
_VECTOR = 16

_ANY = frozenset(
    {
        *("add", "sub", "mul", "div", "truediv", "neg", "pow", "abs", "exp", "log", "sqrt", "rsqrt", "square", "sign"),
        *("iadd", "isub", "imul", "itruediv", "add_", "sub_", "mul_", "div_", "clamp", "clamp_", "clip", "where"),
        *("maximum", "minimum", "lerp", "addcmul", "rsub", "reciprocal", "erf", "sin", "cos", "round", "floor", "ceil"),
        *("relu", "relu_", "relu6", "gelu", "silu", "sigmoid", "sigmoid_", "tanh", "tanh_", "hardswish", "hardsigmoid"),
        *("hardtanh", "hardtanh_", "leaky_relu", "leaky_relu_", "elu", "elu_", "selu", "celu", "mish", "softplus"),
        *("softsign", "prelu", "glu", "softmax", "log_softmax", "logsigmoid", "threshold", "masked_fill"),
        *("batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm", "local_response_norm", "normalize"),
        *(f"{kind}{pool}_pool2d" for kind in ("", "adaptive_") for pool in ("max", "avg")),
        *("cat", "concat", "stack", "chunk", "split", "tensor_split", "unbind", "getitem", "select", "narrow", "pad"),
        *("permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims", "squeeze", "unsqueeze", "expand"),
        *("expand_as", "roll", "flip", "interpolate", "upsample", "to", "type_as", "float", "clone", "detach"),
        *("mean", "sum", "amax", "amin", "var", "std", "norm", "max_pool2d_with_indices"),
        *("conv2d", "conv_transpose2d", "pixel_shuffle", "pixel_unshuffle"),
    }
)
_ENDS = frozenset(
    {"reshape", "flatten", "contiguous", "linear", "matmul", "bmm", "baddbmm", "size", "dim", "numel", "len"}
)
_FACTS_OF_A_TENSOR = frozenset({"shape", "dtype", "device", "ndim"})

# timm's layers that a recording keeps as one node, by name: importing timm takes seconds.
_LAYERS = frozenset(
    {
        *("BatchNormAct2d", "FrozenBatchNormAct2d", "SyncBatchNormAct", "GroupNormAct", "GroupNorm1Act", "GroupNorm1"),
        *("LayerNorm2d", "LayerNormAct2d", "RmsNorm2d", "RmsNormAct2d", "SimpleNorm2d", "DropPath", "StochasticDepth"),
        *("FastAdaptiveAvgPool", "FrozenBatchNorm2d"),
    }
)
_TORCH = frozenset(
    module.__name__ for module in (activation, batchnorm, instancenorm, normalization, padding, pooling, upsampling)
)
# These draw numbers in the order of memory, or view their input as other shapes.
_ORDERED = (nn.RReLU, nn.MultiheadAttention, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
# The roles of inserted nodes that give a few numbers, such as bits and ranges.
_SMALL: tuple[Role, ...] = ("gate", "choice", "bits", "seed", "samples", "range", "cost")


class ChannelsLast(PassBase):
    """Let convolutions of images on a CPU compute with the channels innermost, fused ones as ``Plan.order`` says.

    Layers that take any order keep that one. Before each other node, and before the model's output, values are put in
    the usual order again. Nothing changes in a model whose own weights have the channels innermost, nor in a graph
    where such a copy would hide a write from other readers, nor then in the graph of the model's other mode, which
    calls the same ops.

    Requires: a graph after ``Fuse``. Ensures: values stay the same up to the order of sums in convolutions.
    """

    def requires(self, graph_module: GraphModule) -> None:
        require_fused(graph_module)

    def call(self, graph_module: GraphModule) -> PassResult:
        convs = {node: fused for node in graph_module.graph.nodes if (fused := _image_convolution(graph_module, node))}
        starts, readers = _readers(graph_module, set(convs))
        refused = readers is None or any(
            fused.plan.channels_last is False or _has_own_order(graph_module, node) for node, fused in convs.items()
        )
        for fused in convs.values():
            fused.plan = replace(fused.plan, channels_last=not refused)
        if not convs or readers is None or refused:
            return PassResult(graph_module, False)
        for convolution, image in starts.items():
            _insert(convolution, image, "call_function", with_channels_last)
        for reader, sources in readers.items():
            for source in sources:
                _insert(reader, source, "call_method", "contiguous")
        graph_module.graph.lint()
        graph_module.recompile()
        return PassResult(graph_module, True)


def _insert(reader: Node, source: Node, op: str, target: Callable[[Tensor], Tensor] | str) -> None:
    """Let a node read the result of a call on one of its operands instead of the operand."""
    with reader.graph.inserting_before(reader):
        converted = reader.graph.create_node(op, target, (source,))
    converted.meta["frac"] = replace(facts(source), op=None, blocks=(), role=None, owner=None)
    reader.replace_input_with(source, converted)


def _image_convolution(graph_module: GraphModule, node: Node) -> FusedOp | None:
    """The fused op of a node, if it is a convolution that may compute with the channels innermost."""
    fused = owner_module(graph_module, node)
    if not isinstance(fused, FusedOp) or not isinstance(fused.plan.arithmetic, Convolution):
        return None
    arithmetic, plan = fused.plan.arithmetic, fused.plan
    takes = len(arithmetic.kernel) == 2 and not arithmetic.transposed and not plan.fmt.per_product
    weight = node.kwargs["b"]
    assert isinstance(weight, Node)
    return fused if takes and not _writes_past(arithmetic.kernel, plan.static[0], facts(weight).shape) else None


def _has_own_order(graph_module: GraphModule, node: Node) -> bool:
    """Whether a convolution's weight, or its result in the model, is in another order than the usual one.

    The user has chosen it, or later code views the result in this order.
    """
    if facts(node).channels_last:
        return True
    weight = node.kwargs["b"]
    if not isinstance(weight, Node) or weight.op != "get_attr":
        return False
    value = attrgetter(str(weight.target))(graph_module)
    return isinstance(value, Tensor) and value.ndim == 4 and not value.is_contiguous()


def _writes_past(kernel: Any, stride: Any, weight: tuple[int, ...] | None) -> bool:
    strides = tuple(stride) if isinstance(stride, tuple | list) else (stride,)
    return set(kernel) == {1} and set(strides) != {1} and (weight is None or weight[1] < _VECTOR)


def _readers(graph_module: GraphModule, fused: set[Node]) -> tuple[dict[Node, Node], dict[Node, list[Node]] | None]:
    """The convolutions in float whose image comes in the usual order, and what must be put in that order again.

    The first with their image, the latter with those of their operands; ``None`` if that cannot be done.
    """
    loose: set[Node] = set()
    starts: dict[Node, Node] = {}
    readers: dict[Node, list[Node]] = {}
    for node in graph_module.graph.nodes:
        sources = [source for source in node.all_input_nodes if source in loose]
        reading = "any" if node in fused else _reading(graph_module, node)
        if not sources and reading == "any" and function_name(node) == "conv2d":
            starts[node] = operand(node, (0, "input"))
            loose.add(node)
        elif node in fused or (sources and reading == "any"):
            loose.add(node)
        elif sources and reading == "plain":
            several = any(facts(source).shape is None for source in sources)  # several tensors in one value
            if several or written(node):
                return starts, None
            readers[node] = sources
        if sources and reading != "any" and _is_written(node, sources):
            return starts, None
    return starts, readers


def _reading(graph_module: GraphModule, node: Node) -> Reading:
    if node.op == "call_module":
        return _reading_of(owner_module(graph_module, node), facts(node).role)
    if node.op not in ("call_function", "call_method"):
        return "plain"
    name, role = function_name(node), facts(node).role
    if role in _SMALL:
        return "ends"
    if name == "getattr":
        return "ends" if node.args[1] in _FACTS_OF_A_TENSOR else "plain"
    if name == "conv2d" and (family := contraction(node)) is not None:
        weight = operand(node, family.operands[1])
        shape = facts(weight).shape if isinstance(weight, Node) else None
        if shape is None or _writes_past(shape[2:], operand(node, (3, "stride")) or 1, shape):
            return "plain"
    return "any" if name in _ANY else "ends" if name in _ENDS else "plain"


def _reading_of(module: nn.Module | None, role: Role | None) -> Reading:
    if isinstance(module, FusedOp):
        return "any" if isinstance(module.plan.arithmetic, Convolution) else "ends"
    if role is not None:
        return "ends" if role in _SMALL else "any"
    if isinstance(module, MasklessReLU | nn.Identity):
        return "any"
    if isinstance(module, nn.Flatten):
        return "ends"
    if isinstance(module, _DropoutNd):
        return "plain" if module.p and type(module) in (nn.Dropout, nn.AlphaDropout) else "any"
    known = type(module).__module__ in _TORCH and not isinstance(module, _ORDERED)
    return "any" if known or type(module).__name__ in _LAYERS else "plain"


def _is_written(view: Node, sources: list[Node]) -> bool:
    """Whether a later node writes into memory that a node's value shares with its sources, if these are not copied."""
    memory = memory_of(view)
    return not memory.isdisjoint(sources) and any(
        not memory.isdisjoint(memory_of(operand)) for node in _after(view) for operand in written(node)
    )


def _after(node: Node) -> Iterator[Node]:
    while (node := node.next).op != "root":
        yield node
