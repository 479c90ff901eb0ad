"""Decide each op's precision: float, pinned by a rule, scheduled by stage, or gated for each sample."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fractrain_fx.capture.recording.kept.hidden import HIDDEN
from fractrain_fx.config import FracConfig, Pin, Precision
from fractrain_fx.errors import ModelError, PassError, RuleError, near
from fractrain_fx.passes.analyse.blocks import can_choose
from fractrain_fx.passes.analyse.orders import sample_orders
from fractrain_fx.passes.graph.arithmetic import arithmetic_of
from fractrain_fx.passes.graph.contractions import (
    OPAQUE_KINDS,
    UNSPLIT_KINDS,
    contraction,
    operand,
    other_numbers,
)
from fractrain_fx.passes.graph.edit import unique, varying
from fractrain_fx.passes.graph.facts import KNOWN, STAGE, TRAINED, Decision, Op, blocks_of, facts, ops_of

__all__ = ["DecidePrecision"]

# The labels that a rule can name, as a message explains them.
_LABELS = {
    "first": "what reads the model's floating-point inputs: nothing does in a model that begins with an embedding",
    "last": "what no other contraction reads",
    "depthwise": "convolutions with one channel in each group",
}
# Why an op of a label stays float; the first of several labels counts.
_IN_FLOAT = {
    "first": "first contraction",
    "last": "last contraction",
    "depthwise": "depthwise convolution",
    "constant": "no gradient passes and no weight is read",
}
_MIXED = "its samples are in mixed order, so no gate can choose for each"


class DecidePrecision(PassBase):
    """Put a :class:`Decision` into every op, and mark the blocks that get a gate.

    Defaults: first and last contractions and depthwise convolutions are float; ``config.pins`` override
    that. Every decision has a reason in words.

    Requires: ops and blocks. Ensures: no op is undecided.

    Raises:
        RuleError: a pin matches no op; the message has near names.
        ModelError: the method finds nothing to gate or to quantize, or no attention to leave in float.
    """

    def __init__(self, config: FracConfig) -> None:
        super().__init__()
        self.config = config

    def requires(self, graph_module: GraphModule) -> None:
        if any(can_choose(op) and op.block is None for _, op in ops_of(graph_module.graph)):
            raise PassError("the graph has contractions without a block: run the Blocks pass before DecidePrecision")

    def call(self, graph_module: GraphModule) -> PassResult:
        _name_as_before(graph_module)
        ops = list(ops_of(graph_module.graph))
        labels = _labels(graph_module, ops)
        pins = self._pins([op for _, op in ops], labels, first=not graph_module.meta.get(KNOWN))
        readable = _readable_blocks(graph_module)
        for node, op in ops:
            op.precision = self._decide(node, op, labels.get(op.name, ()), pins.get(op.name), op.block in readable)
        self._one_order(graph_module, ops)
        if self.config.gated:
            _follow_training(graph_module, [op for _, op in ops])
        gated = {op.block for _, op in ops if op.precision.mode == "gated"}
        for block in blocks_of(graph_module.graph):
            block.gated = block.name in gated
        self._refuse_nothing([op for _, op in ops])
        return PassResult(graph_module, True)

    def _one_order(self, graph_module: GraphModule, ops: list[tuple[Node, Op]]) -> None:
        """Gate only ops whose samples are in the order of the first gate, as the controller's state goes on by row."""
        gated = [(node, op) for node, op in ops if op.precision.mode == "gated"]
        if not gated:
            return
        orders = sample_orders(graph_module.graph)
        by_name = {node.name: order for node, order in orders.items()}
        entries = {block.name: by_name[block.entry] for block in blocks_of(graph_module.graph)}
        first = entries[gated[0][1].block or ""]
        for node, op in gated:
            if not first == orders[node] == entries[op.block or ""]:
                op.precision = self._shared(_MIXED)

    def _shared(self, reason: str) -> Decision:
        """The decision for an op that cannot choose for each sample."""
        return Decision("scheduled" if self.config.schedules_rest else "float", reason)

    def _refuse_nothing(self, ops: list[Op]) -> None:
        """Raise an error if the method, or leaving attention in float, would change nothing."""
        attention = any("scaled_dot_product_attention" in op.kind for op in ops)
        if self.config.method != "float" and self.config.attention == "float" and not attention:
            raise ModelError(
                "attention='float' would change nothing: this model calls no scaled_dot_product_attention. If it "
                "multiplies queries, keys and values itself, pin those products: Pin('matmul', Precision(32, 32))"
            )
        left = "every contraction stays float. plan(model, config=FracConfig(method='float')) lists them"
        if self.config.gated and not any(op.precision.mode == "gated" for op in ops):
            reasons = Counter(op.precision.reason for op in ops).most_common(3)
            why = ", ".join(f"{count} ({reason})" for reason, count in reasons)
            raise ModelError(
                f"method {self.config.method!r} finds no block to gate: {left}; 'pfq' works without gates. Why: {why}"
            )
        if self.config.scheduled and all(op.precision.mode == "float" and op.kind not in OPAQUE_KINDS for op in ops):
            raise ModelError(f"method {self.config.method!r} finds nothing to quantize: {left}")

    def _pins(self, ops: list[Op], labels: dict[str, tuple[str, ...]], *, first: bool) -> dict[str, Pin]:
        pins: dict[str, Pin] = {}
        for pin in self.config.pins:
            matched = [
                op.name
                for op in ops
                if can_choose(op)
                and (
                    pin.pattern == op.kind
                    or pin.pattern in labels.get(op.name, ())
                    or fnmatchcase(op.name, pin.pattern)
                    or fnmatchcase(op.module, pin.pattern)
                )
            ]
            if not matched and first:  # graphs of the other mode and of other inputs may lack the op
                known = {op.name for op in ops} | {op.kind for op in ops} | set().union(*labels.values())
                meaning = f" ({_LABELS[pin.pattern]})" if pin.pattern in _LABELS else ""
                raise RuleError(
                    f"the rule for {pin.pattern!r}{meaning} matches none of the model's {len(ops)} contractions."
                    f"{near(pin.pattern, known)} plan(model) lists them all"
                )
            pins.update(dict.fromkeys(matched, pin))
        return pins

    def _decide(self, node: Node, op: Op, labels: tuple[str, ...], pin: Pin | None, readable: bool) -> Decision:
        if op.kind in OPAQUE_KINDS:
            inside = "" if self.config.method == "float" else "; its weights are quantized"
            if op.macs is None:
                return Decision("uncounted", f"kept as one node, no formula for the products inside{inside}")
            return Decision("float", f"activations stay inside one call{inside}")
        if op.macs is None and HIDDEN in node.meta:
            return Decision("uncounted", f"stays float, inside {node.meta[HIDDEN]}")
        if op.macs is None:
            return Decision("uncounted", f"no formula for {op.kind}")
        if self.config.method == "float":
            return Decision("float", "method float")
        if op.kind in UNSPLIT_KINDS:
            fused = op.kind == "scaled_dot_product_attention"
            return Decision("float", "attention='float'" if fused else "one call multiplies more than two tensors")
        if (other := other_numbers(node)) is not None:
            return Decision("float", other)
        name = self.config.format if pin is None or pin.number_format is None else pin.number_format
        lacks = arithmetic_of(node) if self.config.rounds_anew(name) else None
        no_form = f"format {name!r} has no form for it: {lacks}" if isinstance(lacks, str) else None
        if pin is not None:
            format_and_recipe = pin.number_format, pin.product_recipe
            if no_form is not None:
                return Decision("float", no_form, None, *format_and_recipe)
            reason = f"rule {pin.pattern!r}" + (f", {pin.named}" if pin.named else "")
            if isinstance(pin.precision, Precision):
                return Decision("pinned", reason, pin.precision, *format_and_recipe)
            return Decision("scheduled", reason, None, *format_and_recipe, stages=pin.stages)
        if labels:
            return Decision("float", _IN_FLOAT[labels[0]])
        if no_form is not None:
            return Decision("float", no_form)
        if self.config.scheduled:
            return Decision("scheduled", STAGE)
        if facts(node).batch is not None and readable:
            return Decision("gated", f"gate of block {op.block!r}")
        if facts(node).batch is not None:
            why = f"all samples share the entry of block {op.block!r}, so no gate can read it"
        elif facts(node).samples is not None:
            why = _MIXED
        else:
            why = "all samples share it, so no gate can choose for each"
        return self._shared(why)


def _name_as_before(graph_module: GraphModule) -> None:
    """Rename blocks as in the graph that was rewritten before, because gates are found by block name.

    In evaluation these are the blocks of the same ops as in training, and in another recording those that share ops.
    """
    known: list[GraphModule] = graph_module.meta.get(KNOWN, [])
    if not known:
        return
    blocks, ops = blocks_of(graph_module.graph), {op.name: op for _, op in ops_of(graph_module.graph)}
    before = blocks_of(known[0].graph)
    same = {block.ops: block.name for block in before}
    sharing = {name: block.name for block in before for name in block.ops} if TRAINED not in graph_module.meta else {}
    taken, used = set(same.values()), set[str]()
    for block in blocks:
        names = (same.get(block.ops), *(sharing.get(name) for name in block.ops))
        block.name = next((name for name in names if name and name not in used), None) or unique(block.name, taken)
        taken.add(block.name)
        used.add(block.name)
        for name in block.ops:
            ops[name].block = block.name


def _follow_training(graph_module: GraphModule, ops: list[Op]) -> None:
    """Steer the ops of an evaluation graph as training does: other gates and ranges would never be trained."""
    training = graph_module.meta.get(TRAINED)
    if training is None:
        return
    trained = {op.name: op for _, op in ops_of(training.graph)}
    for op in ops:
        known = trained.get(op.name)
        if op.precision.mode == "scheduled" and (known is None or known.precision.mode != "scheduled"):
            op.precision = Decision("float", "training does not round it by stage")
        if op.precision.mode != "gated":
            continue
        if known is not None and known.precision.mode != "gated":
            op.precision = known.precision
        elif known is None or known.block != op.block:
            op.precision = Decision("float", "training has no gate for this block")


def _readable_blocks(graph_module: GraphModule) -> set[str | None]:
    """Blocks whose entry a gate can read: a floating-point tensor with a row for each sample."""
    nodes = {node.name: facts(node) for node in graph_module.graph.nodes}
    return {
        block.name
        for block in blocks_of(graph_module.graph)
        if (entry := nodes[block.entry]).batch is not None and entry.dtype is not None and entry.dtype.is_floating_point
    }


def _labels(graph_module: GraphModule, ops: list[tuple[Node, Op]]) -> dict[str, tuple[str, ...]]:
    """Which ops are ``first``, ``last``, ``depthwise`` or ``constant`` (products of constants)."""
    moving = varying(graph_module.graph)
    contractions = {node for node, _ in ops}
    untouched: set[Node] = set()  # float inputs, and nodes computed from them without a contraction
    product: set[Node] = set()
    for node in graph_module.graph.nodes:
        sources = node.all_input_nodes
        if node in contractions or any(source in product for source in sources):
            product.add(node)
        elif (node.op == "placeholder" and _floating(node)) or any(source in untouched for source in sources):
            untouched.add(node)
    after: set[Node] = set()
    for node in reversed(list(graph_module.graph.nodes)):
        if any(user in contractions or user in after for user in node.users):
            after.add(node)
    residual = {name for block in blocks_of(graph_module.graph) if block.skip for name in block.ops}
    labels: dict[str, tuple[str, ...]] = {}
    for node, op in ops:
        family = contraction(node)
        first, second = (operand(node, place) for place in family.operands) if family else (None, None)
        labels[op.name] = tuple(
            label
            for label, holds in (
                ("first", (first in untouched or second in untouched) and not {first, second} & product),
                ("last", node not in after and op.name not in residual),
                ("depthwise", op.depthwise),
                ("constant", second in moving and not op.input_gradient and not op.weight_gradient),
            )
            if holds
        )
    return labels


def _floating(node: Node) -> bool:
    dtype = facts(node).dtype
    return dtype is not None and (dtype.is_floating_point or dtype.is_complex)
