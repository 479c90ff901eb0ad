"""Let torchao compute linear layers, in the copy of the graph that runs."""

from __future__ import annotations

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fractrain_fx.config import TORCHAO_PRECISION, FracConfig, Torchao
from fractrain_fx.errors import ModelError, PassError
from fractrain_fx.execution.fused_op import FusedOp
from fractrain_fx.execution.simulated.arithmetic import Arithmetic, Linear
from fractrain_fx.execution.torchao.linear import MULTIPLES, TorchaoLinear
from fractrain_fx.passes.execute.fuse import require_fused
from fractrain_fx.passes.execute.left_out import left_out
from fractrain_fx.passes.graph.facts import Op, facts

__all__ = ["UseTorchao", "not_on_torchao"]


class UseTorchao(PassBase):
    """Let torchao compute each fused linear layer at FW-8/BW-8, forward and backward.

    The values are torchao's, in evaluation too. :func:`not_on_torchao` names the ops that stay as they are.

    Requires: a graph after ``Fuse``. Ensures: nodes and parameters stay the same, and ranges are measured as before.

    Args:
        kind: int8, float8 or MXFP8.

    Raises:
        ConfigError: torchao is not installed.
        ModelError: torchao can compute no op of the graph.
    """

    def __init__(self, kind: Torchao) -> None:
        super().__init__()
        self._kind = kind

    def requires(self, graph_module: GraphModule) -> None:
        require_fused(graph_module)

    def call(self, graph_module: GraphModule) -> PassResult:
        given = 0
        for node in graph_module.graph.find_nodes(op="call_module"):
            fused, op = graph_module.get_submodule(str(node.target)), facts(node).op
            if isinstance(fused, FusedOp) and op is not None:
                fused.torchao = self._layer(node, fused, op)
                given += fused.torchao is not None
        quantized = any(facts(node).role in ("fused", "gradient") for node in graph_module.graph.nodes)
        if quantized and not given:
            raise ModelError(
                f"execution={self._kind!r} would change nothing: no quantized op of this model is a linear layer that "
                "torchao can compute (plan(model, ...) gives each reason); use execution='simulate'"
            )
        return PassResult(graph_module, given > 0)

    def _layer(self, node: Node, fused: FusedOp, op: Op) -> TorchaoLinear | None:
        weight, added = node.kwargs["b"], node.kwargs["added"]
        plan = fused.plan
        if plan.first.weight or not plan.second.weight or not isinstance(weight, Node):
            return None
        bias = added if isinstance(added, Node) else None
        if _reason(plan.arithmetic, op, weight, bias, self._kind) is not None:
            return None
        outputs, inputs = facts(weight).shape or ()
        return TorchaoLinear(self._kind, inputs, outputs, bias is not None)

    def ensures(self, graph_module: GraphModule) -> None:
        for module in graph_module.modules():
            if isinstance(module, FusedOp) and module.torchao is not None and module.int8 is not None:
                raise PassError("an op was given both to torchao and to int8 products")


def not_on_torchao(graph_module: GraphModule, config: FracConfig) -> dict[str, str]:
    """By name, the quantized ops of a shown graph that torchao does not compute, with the reason."""
    if config.torchao is None:
        return {}
    kind = config.torchao

    def reason(node: Node, op: Op, arithmetic: Arithmetic, weight: Node) -> str | None:
        fused = node.op == "call_module"
        added = node.kwargs["added"] if fused else arithmetic.bind(node.args, node.kwargs).added
        return _reason(arithmetic, op, weight, added if isinstance(added, Node) else None, kind)

    return left_out(graph_module, reason)


def _reason(arithmetic: Arithmetic, op: Op, weight: Node, bias: Node | None, kind: Torchao) -> str | None:
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
        word = kind.removeprefix("torchao-")
        return f"its weight is {'x'.join(map(str, sizes))}, and {word} takes multiples of {multiple} only"
    return None
