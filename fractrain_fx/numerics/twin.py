"""Run the shown graph with the rounding of some ops left out, and look at every op's output and gradient."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from fractrain_fx.capture import RecordedModule
from fractrain_fx.capture.recording.regions import NodeByNode
from fractrain_fx.capture.state import Snapshot
from fractrain_fx.errors import ModelError
from fractrain_fx.execution.arithmetic import Bound
from fractrain_fx.execution.fused_op import FusedOp
from fractrain_fx.passes import facts, ops_of

__all__ = ["Pass", "Twin"]


@dataclass
class Pass:
    """One forward and backward pass; ``loss`` is ``None`` before it is computed.

    ``outputs`` and ``gradients`` are each op's output and its gradient. ``weights`` has gradients of the parameters
    that the graph reads, by name; ``choices`` are of the gates, by block. ``local`` is, for each op, what its own
    rounding changes in its output, weighed by the output's gradient.
    """

    output: Any = None
    loss: Tensor | None = None
    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    choices: dict[str, Tensor] = field(default_factory=dict)
    local: dict[str, Tensor] = field(default_factory=dict)


class Twin:
    """A rewritten graph, as it is shown for training, whose ops can be switched to float, one by one.

    Every pass starts from the same buffers and random generators and leaves them, and all gradients, as they were.
    ``values`` are those of the graph's inputs.
    """

    def __init__(self, graph_module: RecordedModule, values: Sequence[Any], loss: Callable[[Any], Tensor]) -> None:
        self.graph_module, self._values, self._loss = graph_module, tuple(values), loss
        self.ops = {op.name: op for _, op in ops_of(graph_module.graph)}
        """The contractions of the graph, in order."""
        self.rounding = [name for name, op in self.ops.items() if op.precision.rounds]
        """The names of those that round."""
        parameters = graph_module.named_parameters()
        self._parameters = {name: p for name, p in parameters if p.requires_grad and not name.startswith("frac.")}

    def run(
        self,
        in_float: Collection[str] = (),
        choices: Mapping[str, Tensor] | None = None,
        *,
        locally: bool = False,
    ) -> Pass:
        """Forward and backward; ops in ``in_float`` round nothing, and gates choose unless ``choices`` are given.

        ``locally`` computes :attr:`Pass.local`.
        """
        result = Pass()
        held = list(self.graph_module.buffers())
        with Snapshot(self.graph_module, held=held).preserved(), torch.enable_grad():
            run = _Run(self.graph_module, result, frozenset(in_float), choices or {}, locally)
            # The graph's second output is its cost.
            result.output = run.run(*self._values)[0]
            result.loss = self._loss(result.output)
            if result.loss.requires_grad:
                parameters = list(self._parameters.values())
                gradients = torch.autograd.grad(result.loss, parameters, allow_unused=True)
                named = zip(self._parameters, gradients, strict=True)
                result.weights = {name: g.detach() for name, g in named if g is not None}
        for name, error in result.local.items():
            if name in result.gradients:
                result.local[name] = (error * result.gradients[name]).square().sum()
        return result


class _Run(NodeByNode):
    def __init__(
        self,
        graph_module: RecordedModule,
        found: Pass,
        in_float: frozenset[str],
        choices: Mapping[str, Tensor],
        locally: bool,
    ) -> None:
        super().__init__(graph_module, garbage_collect_values=False)  # an op in float reads what was rounded
        self._found, self._in_float, self._choices, self._locally = found, in_float, choices, locally

    def run_node(self, n: Node) -> Any:
        record = facts(n)
        if record.role == "choice":
            block = record.owner or ""
            value = self._choices.get(block)
            value = super().run_node(n) if value is None else value
            self._found.choices[block] = value.detach()
            return value
        if record.role == "gradient" and record.owner in self._in_float:
            (source, *_) = n.args
            value = self.env[source]  # type: ignore[index]
        elif record.op is not None and record.op.name in self._in_float:
            value = self._unrounded(n)
        else:
            value = super().run_node(n)
        if record.op is not None and isinstance(value, Tensor):
            name = record.op.name
            if self._locally and name not in self._in_float and record.op.precision.rounds:
                with torch.no_grad():
                    self._found.local[name] = self._unrounded(n).detach() - value.detach()
            self._keep(name, value)
        return value

    def _unrounded(self, n: Node) -> Any:
        """The op of a node on operands that are not rounded."""
        if n.op == "call_module":
            module = self.fetch_attr(str(n.target))
            if not isinstance(module, FusedOp):  # a module that is kept as one node, with rounded weights
                return super().run_node(n)
            plan = module.plan
            arguments: Any = self.map_nodes_to_values(n.kwargs, n)
            if plan.first.frozen is not None or plan.second.frozen is not None:
                raise ModelError(
                    "compare() needs the float weights, and pack_frozen() keeps codes in their place: compare before "
                    "pack_frozen, or a model that was packed with restore() called since"
                )
            return plan.arithmetic.forward(Bound(arguments["a"], arguments["b"], arguments["added"], plan.static))
        args, kwargs = (self.map_nodes_to_values(map_arg(inputs, _before_rounding), n) for inputs in (n.args, n.kwargs))
        return getattr(self, n.op)(n.target, args, kwargs)

    def _keep(self, name: str, value: Tensor) -> None:
        """Keep an output as it is now: later nodes may change it in place."""
        self._found.outputs[name] = value.detach().clone()
        if value.requires_grad:
            value.register_hook(lambda g: self._found.gradients.__setitem__(name, g.detach().clone()))


def _before_rounding(node: Node) -> Any:
    return node.args[0] if facts(node).role in ("input", "weight") else node
