"""Build a picture of the blocks of a rewritten graph, or of its ops within their blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from torch.fx import Node

from fractrain_fx.drawing.flow import Flow
from fractrain_fx.drawing.labels import block_shape, op_shape, short
from fractrain_fx.drawing.picture import Picture, Shape, ShapeKind
from fractrain_fx.model import FracModel
from fractrain_fx.passes import Block, Op, facts, gate_sizes, ops_of
from fractrain_fx.passes.analyse.linearity import is_identity
from fractrain_fx.passes.graph.aliases import is_view
from fractrain_fx.passes.graph.edit import module_path, owner_module
from fractrain_fx.passes.graph.facts import choices_of
from fractrain_fx.passes.graph.tensors import shapes_in_words

__all__ = ["Level", "picture"]

Level = Literal["blocks", "ops"]


def picture(model: FracModel, level: Level, *, shapes: bool = False) -> Picture:
    """The picture of ``model.graph_module``.

    ``blocks``: one shape for each block, and for each op outside of blocks. ``ops``: one shape for each contraction, a
    frame for each block, and one shape for each sequence of calls between contractions. ``shapes``: blocks and ops name
    the shapes of the tensors that enter and leave them.
    """
    return _Builder(model, level, shapes).build()


class _Builder:
    """Walks over the graph once, and keeps for each node the shapes that its value comes from."""

    def __init__(self, model: FracModel, level: Level, shapes: bool) -> None:
        self.model, self.level = model, level
        self.graph_module = model.graph_module
        self.words = shapes_in_words(self.graph_module) if shapes else {}
        self.flow = Flow(self.graph_module)
        self.picture = Picture(f"{type(model._state.original).__name__}, method {model.frac_config.method}")
        self.total = sum(op.macs or 0 for _, op in ops_of(self.graph_module.graph))
        self.came: dict[Node, tuple[str, ...]] = {}
        self.steps: dict[str, list[Node]] = {}
        self.ends = {self.flow.nodes[block.exit]: block for block in self.flow.blocks if block.skip is not None}

    def build(self) -> Picture:
        """The picture."""
        ops = dict(ops_of(self.graph_module.graph))
        for node in self.graph_module.graph.nodes:
            op = ops.get(node)
            if node in self.flow.activations or op is not None:
                self.came[node] = self._place(node, op)
        self._gates()
        self._output()
        return self.picture

    def _place(self, node: Node, op: Op | None) -> tuple[str, ...]:
        """Draw a node, unless another shape includes it; returns the shapes that its value comes from."""
        sources = self._sources(node)
        block = self.flow.block_of.get(node)
        if node.op == "placeholder":
            return (self._shape("input", node.name, node.name),)
        if self.flow.is_quantizer(node):
            return sources
        if node in self.ends:
            return (self._end(node, self.ends[node], sources),)
        if self.level == "blocks":
            if block is not None:
                return (self._joined(self._block(block), sources),)
            if op is None and len(sources) < 2:
                return sources or self._inputs(node)
        if op is not None:
            return (self._joined(self._op(op), sources or self._inputs(node)),)
        if facts(node).role == "skip" and block is not None:
            return (
                self._joined(self._shape("skip", node.name, "keep or drop", block, ("* (1 - choice 0)",)), sources),
            )
        if self._passes_on(node) and len(sources) == 1:
            return sources
        return (self._step(node, block, sources or self._inputs(node)),)

    def _sources(self, node: Node) -> tuple[str, ...]:
        shapes = [shape for source in self.flow.sources(node) for shape in self.came.get(source, ())]
        shapes += [self._shape("input", mask.name, mask.name) for mask in self.flow.masks(node)]
        return tuple(dict.fromkeys(shapes))

    def _inputs(self, node: Node) -> tuple[str, ...]:
        return tuple(self._shape("input", source.name, source.name) for source in self.flow.inputs([node]))

    def _shape(
        self, kind: ShapeKind, name: str, title: str, block: Block | None = None, lines: tuple[str, ...] = ()
    ) -> str:
        key = f"{kind} {name}".strip()
        if key not in self.picture.shapes:
            owner = block.name if block is not None else None
            self.picture.add(Shape(key, kind, title, lines, owner or "", owner))
        return key

    def _joined(self, shape: str, sources: Iterable[str]) -> str:
        for source in sources:
            self.picture.join(source, shape, "data")
        return shape

    def _block(self, block: Block) -> str:
        key = f"block {block.name}"
        if key not in self.picture.shapes:
            self.picture.add(self._block_shape(block))
        return key

    def _block_shape(self, block: Block) -> Shape:
        return block_shape(block, self._ops(block), self.model.frac_config, self.total, self.words.get(block.name, ""))

    def _ops(self, block: Block) -> list[Op]:
        return [op for _, op in ops_of(self.graph_module.graph) if op.block == block.name]

    def _op(self, op: Op) -> str:
        return self.picture.add(op_shape(op, self.model.frac_config, self.total, self.words.get(op.name, "")))

    def _end(self, node: Node, block: Block, sources: tuple[str, ...]) -> str:
        """The add of a residual block, with its skip path (at level ``ops`` a projection is drawn as its ops)."""
        end = self._shape("add", block.name, "+", block)
        shown = block.skip == "identity" or self.level == "blocks"
        past = self.came.get(self.flow.nodes[block.entry], ()) if shown else ()
        for source in past:
            self.picture.join(source, end, "skip")
        return self._joined(end, (source for source in sources if source not in past))

    def _step(self, node: Node, block: Block | None, sources: tuple[str, ...]) -> str:
        """A call that multiplies nothing: a new shape, or a line on the shape of the call before it."""
        before = sources[0] if len(sources) == 1 else ""
        if before in self.steps and self._continues(node, before, block):
            calls = self.steps[before]
            calls.append(node)
        else:
            before = f"step {node.name}"
            calls = self.steps[before] = [node]
        titles = tuple(dict.fromkeys(short(call, self.graph_module) for call in calls))
        owner = block.name if block is not None else None
        shape = Shape(before, "step", titles[0], titles[1:], module_path(calls[0]), owner)
        self.picture.shapes[before] = shape
        return self._joined(before, sources)

    def _continues(self, node: Node, before: str, block: Block | None) -> bool:
        last = self.steps[before][-1]
        readers = [user for user in last.users if user in self.flow.activations]
        same = self.flow.block_of.get(last) is block
        return same and len(readers) == 1 and len(self.flow.sources(node)) == 1

    def _passes_on(self, node: Node) -> bool:
        """Whether a node gives its input on: as a view, a cast or a copy, or as dropout that drops nothing."""
        owner = owner_module(self.graph_module, node)
        if owner is None:
            return is_view(node) or is_identity(self.graph_module, node)
        off = getattr(owner, "p", None) == 0.0 or getattr(owner, "drop_prob", None) == 0.0
        return is_identity(self.graph_module, node) or (off and not any(True for _ in owner.children()))

    def _gates(self) -> None:
        """Draw gates with their inputs and choices, in the order in which the controller's state passes them."""
        config = self.model.frac_config
        choices = choices_of(self.graph_module.graph)
        if not choices:
            if config.scheduled:
                stages = tuple(str(stage) for stage in config.precision_stages)
                stage = self._shape("stage", "", "stage", lines=stages)
                self.picture.join(stage, self._shape("cost", "", "cost", lines=("cp, cp_total",)), "cost")
            return
        sizes = gate_sizes(self.graph_module, config)
        sizes_of = (f"LSTM cell {config.gate.hidden}", f"head to {len(config.gate_options)} options")
        before = self._shape("controller", "", "controller", lines=sizes_of)
        blocks = {block.name: block for block in self.flow.blocks}
        for name in choices:
            block = blocks[name]
            gate = self._shape("gate", name, "gate", block, lines=(f"{sizes[name].macs:,} MACs",))
            for source in self.came.get(self.flow.nodes[block.entry], ()):
                self.picture.join(source, gate, "reads")
            self.picture.join(before, gate, "state")
            for target in self._steered(block):
                self.picture.join(gate, target, "choice")
            before = gate
        self.picture.join(
            before, self._shape("cost", "", "cost", lines=("sums every choice", "to cp and cp_total")), "cost"
        )

    def _steered(self, block: Block) -> list[str]:
        """The shapes that a block's choice steers: the block, or each gated op in it and its skip select."""
        if self.level == "blocks":
            return [f"block {block.name}"]
        steered = [f"op {op.name}" for op in self._ops(block) if op.precision.mode == "gated"]
        shapes = self.picture.shapes.values()
        return [*steered, *(shape.id for shape in shapes if shape.kind == "skip" and shape.block == block.name)]

    def _output(self) -> None:
        output = self._shape("output", "", "output")
        (end,) = self.graph_module.graph.find_nodes(op="output")
        for node in end.all_input_nodes:
            if facts(node).role != "cost":
                self._joined(output, self.came.get(node, ()))
        if self.level == "ops":
            for block in self.flow.blocks:
                self.picture.blocks[block.name] = self._block_shape(block)
