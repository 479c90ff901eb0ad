"""Look at the operands of every quantized op of one training step, where they are rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils.hooks import RemovableHandle

from fractrain_fx.execution.arithmetic import Needs
from fractrain_fx.execution.plan import Call, Plan
from fractrain_fx.execution.rounded import FIRST, SECOND
from fractrain_fx.execution.roundings import Rounding, forward_roundings, gradient_roundings, without_skipped
from fractrain_fx.formats import Operand
from fractrain_fx.nn.quantizers import ActivationQuantizer, GradientQuantizer, WeightQuantizer
from fractrain_fx.numerics.records import OperandRecord
from fractrain_fx.numerics.statistics import Measured, measure, measure_output, statistics_of
from fractrain_fx.numerics.what_if import WhatIf
from fractrain_fx.passes import facts, fused_ops
from fractrain_fx.passes.graph.contractions import contraction, operand
from fractrain_fx.passes.graph.edit import graphs_of

__all__ = ["PRODUCTS", "StepObservations", "observe"]

PRODUCTS = {"forward": "FW", "input_gradient": "EB", "weight_gradient": "GC"}
"""The short names of an op's products, as the rest of the package shows them."""

Running = tuple[Tensor, Tensor]
Letter = Literal["x", "w", "g"]
Reader = tuple[str, Letter]  # an op's name, and one of its operands

_PRODUCTS_OF: dict[Letter, tuple[str, ...]] = {"x": ("FW", "GC"), "w": ("FW", "EB"), "g": ("EB", "GC")}


@dataclass
class StepObservations:
    """What was seen of a step so far, on the model's device, and in other formats to round in as well (``what_ifs``).

    ``at_first_gradient`` is called when the backward pass begins.
    """

    what_ifs: Sequence[WhatIf] = ()
    at_first_gradient: Callable[[], None] | None = None
    _keys: list[tuple[str, str, tuple[str, ...], str]] = field(default_factory=list)
    _measured: list[Measured] = field(default_factory=list)

    def began_backward(self) -> None:
        """Call at every gradient."""
        call, self.at_first_gradient = self.at_first_gradient, None
        if call is not None:
            call()

    def add(self, op: str, operand: str, products: Sequence[str], measured: Measured, as_if: str = "") -> None:
        """Keep what was measured of one operand."""
        self._keys.append((op, operand, tuple(products), as_if))
        self._measured.append(measured)

    def add_rounding(
        self, op: str, rounding: Rounding, products: Sequence[str], running: Running | None = None, as_if: str = ""
    ) -> None:
        """Measure an operand, unless it is empty."""
        if rounding.values.numel():
            self.add(op, rounding.of.tensor, products, measure(rounding, running), as_if)

    def add_output(self, op: str, x: Tensor, operand: str = "y", products: Sequence[str] = ("FW",)) -> None:
        """Measure a tensor that is not rounded."""
        if x.numel():
            self.add(op, operand, products, measure_output(x))

    def read(self) -> tuple[OperandRecord, ...]:
        """Everything, read from the device at once."""
        if not self._measured:
            return ()
        rows = torch.stack([measured.numbers for measured in self._measured]).tolist()
        blocks = [measured.scales for measured in self._measured if measured.scales is not None]
        counts = iter(torch.stack(blocks).tolist() if blocks else ())
        records = []
        for (op, letter, products, as_if), row, measured in zip(self._keys, rows, self._measured, strict=True):
            statistics = statistics_of(row, None if measured.scales is None else next(counts))
            records.append(OperandRecord(op, letter, products, statistics, as_if))
        return tuple(records)


@contextmanager
def observe(graph_module: GraphModule, seen: StepObservations) -> Iterator[None]:
    """Show the run of a graph inside, and its backward pass, to ``seen``."""
    fused = fused_ops(graph_module)
    handles: list[RemovableHandle] = []
    for name, op in fused.items():
        op.observer = _OpObserver(name, seen, [_running_range(factor) for factor in op._quantizers[:2]])
    for graph, node, readers in _quantize_nodes(graph_module):
        handles.append(_hooked(graph.get_submodule(str(node.target)), readers, seen))
    try:
        yield
    finally:
        for op in fused.values():
            op.observer = None
        for handle in handles:
            handle.remove()


class _OpObserver:
    """Sees one fused op; ``seen`` takes what is measured, and ``running`` has the running ranges of both factors."""

    def __init__(self, name: str, seen: StepObservations, running: Sequence[Running | None]) -> None:
        self._name, self._seen, self._running = name, seen, running
        self._ran = self._returned = False

    def forward(self, plan: Plan, call: Call, out: Tensor) -> None:
        if self._ran:
            return
        self._ran = True
        self._add_factors(plan, call)
        for what_if in self._seen.what_ifs:
            self._add_factors(*what_if.applied(plan, call), as_if=what_if.name)
        self._seen.add_output(self._name, out)

    def _add_factors(self, plan: Plan, call: Call, as_if: str = "") -> None:
        of_a, of_b = forward_roundings(plan, call)
        for rounding, factor, running in zip((of_a, of_b), (plan.first, plan.second), self._running, strict=True):
            if factor.frozen is None:
                products = ("FW",) if rounding.fmt.per_product else _PRODUCTS_OF[rounding.of.tensor]
                self._seen.add_rounding(self._name, rounding, products, None if as_if else running, as_if)

    def backward(self, plan: Plan, call: Call, g: Tensor, needs: Needs) -> None:
        if self._returned:
            return
        self._returned = True
        self._seen.began_backward()
        if call.bits is None or call.seed is None:
            self._seen.add_output(self._name, g, "g", ("EB", "GC"))
            return
        self._add_gradient(plan, call, g, needs)
        for what_if in self._seen.what_ifs:
            self._add_gradient(*what_if.applied(plan, call), g, needs, as_if=what_if.name)

    def _add_gradient(self, plan: Plan, call: Call, g: Tensor, needs: Needs, as_if: str = "") -> None:
        g = without_skipped(plan, call, g)
        slots = [slot for slot, need in ((SECOND, needs[0]), (FIRST, needs[1])) if need]
        names = []
        for slot in slots:
            of_g, other = gradient_roundings(plan, call, g, slot, call.seed)
            names.append(PRODUCTS[other.of.product])
            if of_g is not None and plan.fmt.per_product:
                self._seen.add_rounding(self._name, of_g, names[-1:], as_if=as_if)
            if other.fmt.per_product and (plan.first if slot == FIRST else plan.second).frozen is None:
                self._seen.add_rounding(self._name, other, names[-1:], as_if=as_if)
        if of_g is not None and not plan.fmt.per_product:
            self._seen.add_rounding(self._name, of_g, sorted(names), as_if=as_if)


def _running_range(quantizer: nn.Module) -> Running | None:
    if not isinstance(quantizer, ActivationQuantizer) or quantizer.fmt.per_product:
        return None
    return quantizer.range.lo, quantizer.range.span


def _quantize_nodes(graph_module: GraphModule) -> Iterator[tuple[GraphModule, Node, list[Reader]]]:
    """The quantize nodes that were not fused, with the ops that read each."""
    for graph in graphs_of(graph_module):
        for node in graph.graph.find_nodes(op="call_module"):
            role = facts(node).role
            if role == "gradient":
                yield graph, node, [(facts(node).owner or "", "g")]
            elif role in ("input", "weight"):
                yield graph, node, [reader for user in node.users for reader in _readers(node, user)]


def _readers(quantize: Node, user: Node) -> Iterator[Reader]:
    """The op of ``user``, and which of its operands ``quantize`` is."""
    op, family = facts(user).op, contraction(user)
    if op is None or family is None:
        return
    first, second = (operand(user, place) for place in family.operands)
    letters: tuple[Letter, Letter] = ("w", "x") if facts(first).role == "weight" else ("x", "w")
    yield from ((op.name, letter) for node, letter in zip((first, second), letters, strict=True) if node is quantize)


def _hooked(quantizer: nn.Module, readers: Sequence[Reader], seen: StepObservations) -> RemovableHandle:
    """Watch a quantizer that runs as a module of its own."""
    done = False  # the module runs again where backward computes activations again

    def hook(module: Any, args: tuple[Any, ...], out: Tensor) -> None:
        nonlocal done
        if done:
            return
        done = True
        x = args[0].detach()
        if isinstance(module, GradientQuantizer):
            _watch_gradient(module, args, out, readers, seen)
        elif isinstance(module, ActivationQuantizer):
            bits = module.axis.expand(module.bits_of(args[1]), x.shape)
            of = Operand("forward", "x", (x.ndim - 1,))
            within = module.fmt.sample_ranges(x, module.axis)
            _add(Rounding(x, bits, of, module.fmt, within), readers, seen, _running_range(module))
        elif isinstance(module, WeightQuantizer) and module.frozen is None:
            of = Operand("forward", "w", (x.ndim - 1,), channel=module.dim, weight=True)
            _add(Rounding(x, args[1], of, module.fmt, module.fmt.weight_range(x, dim=module.dim)), readers, seen)

    return quantizer.register_forward_hook(hook)


def _watch_gradient(
    module: GradientQuantizer, args: tuple[Any, ...], out: Tensor, readers: Sequence[Reader], seen: StepObservations
) -> None:
    seen.add_output(readers[0][0], out)
    if not out.requires_grad or not module.training:
        return
    bits, seed = module.bits_of(args[1]), module.seed_of(args[2] if len(args) > 2 else None)
    done = False

    def hook(g: Tensor) -> None:
        nonlocal done
        if done or seed is None:
            return
        done = True
        seen.began_backward()
        axis = module.axis.of_bits(bits, g.shape)
        of = Operand("input_gradient", "g", (g.ndim - 1,), axis)
        _add(Rounding(g, axis.expand(bits, g.shape), of, module.fmt, seed=seed), readers, seen)

    out.register_hook(hook)


def _add(rounding: Rounding, readers: Sequence[Reader], seen: StepObservations, running: Running | None = None) -> None:
    """Add what ops read, as it is and in other formats."""
    for name, letter in readers:
        of = rounding.of._replace(tensor=letter)
        seen.add_rounding(name, replace(rounding, of=of), _PRODUCTS_OF[letter], running)
        for what_if in seen.what_ifs:
            bits = torch.tensor(
                what_if.precision.bw if letter == "g" else what_if.precision.fw, device=rounding.values.device
            )
            fmt, within = what_if.format_for(rounding.fmt), what_if.range_of(rounding.within)
            other = replace(rounding, bits=bits, of=of, fmt=fmt, within=within)
            seen.add_rounding(name, other, _PRODUCTS_OF[letter], as_if=what_if.name)
