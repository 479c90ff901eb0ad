"""The typed record that passes keep of each node, under ``node.meta["frac"]``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.fx import Graph, GraphModule, Node

from fractrain_fx.config import FracConfig, Recipe
from fractrain_fx.config.precision import Precision, PrecisionStages
from fractrain_fx.formats.batch_axis import BatchAxis

__all__ = [
    "FIXED_BATCH",
    "KNOWN",
    "STAGE",
    "TRAINED",
    "Block",
    "Decision",
    "Facts",
    "Op",
    "Product",
    "blocks_of",
    "choices_of",
    "facts",
    "fixed_batch",
    "ops_of",
]

TRAINED = "trained"
"""Key of an evaluation graph's ``meta``: the training graph, in which the gates of both graphs are trained."""

FIXED_BATCH = "fixed_batch"
"""Key of ``graph_module.meta``: whether the graph runs only at the batch size of its example."""

KNOWN = "known graphs"
"""Key of a graph's ``meta``: the model's graphs that were rewritten before, whose names its ops and modules take."""

STAGE = "stage precision"
"""The reason of an op that is scheduled because the whole model is."""

Mode = Literal["float", "pinned", "scheduled", "gated", "uncounted"]
Role = Literal[
    "gate",
    "choice",
    "skip",
    "input",
    "weight",
    "gradient",
    "bits",
    "seed",
    "samples",
    "range",
    "fused",
    "dispatched",
    "cost",
]


@dataclass(frozen=True)
class Decision:
    """The precision of an op, and the reason for it.

    Attributes:
        mode: ``float``, ``pinned`` (by a rule), ``scheduled`` (one precision for all samples, by stage), ``gated``
            (chosen for each sample) or ``uncounted`` (no formula gives its cost, and it stays float).
        reason: the rule or cause in words.
        precision: the bits of a pinned op.
        format: its number format, if its rule names one that is not the configuration's.
        recipe: the recipe of that format, if it is one of blocks.
        stages: the bits of a scheduled op in each stage, if its rule gives them.
        now: the bits of the present stage, in ``FracModel.ops``. ``str`` gives these.
    """

    mode: Mode
    reason: str
    precision: Precision | None = None
    format: str | None = None
    recipe: Recipe | None = None
    stages: tuple[Precision, ...] | None = None
    now: str = field(default="", compare=False)

    def recipe_under(self, config: FracConfig) -> Recipe | None:
        """How a block format rounds the op's operands: the recipe of its rule, or that of the configuration."""
        return config.product_recipe if self.format is None else self.recipe

    @property
    def rounds(self) -> bool:
        """Whether the op's operands are rounded."""
        return self.mode not in ("float", "uncounted")

    def levels(self, config: FracConfig) -> tuple[Precision, ...]:
        """The bits of a scheduled op in each stage."""
        return config.precision_stages if self.stages is None else self.stages

    def at(self, config: FracConfig, stage: Precision) -> Precision:
        """The bits of a scheduled op in the stage of this precision."""
        return stage if self.stages is None else self.stages[config.precision_stages.index(stage)]

    @property
    def bits(self) -> str | None:
        """The bits that a rule gives the op."""
        precision = PrecisionStages(self.stages) if self.stages else self.precision
        return None if precision is None else str(precision)

    @property
    def words(self) -> str:
        """The mode, with the bits of a rule, and the reason."""
        bits = f" {self.bits}" if self.bits else ""
        return f"{self.mode}{bits}: {self.reason}"

    def __str__(self) -> str:
        return self.now or self.words


@dataclass(frozen=True)
class Product:
    """An op of one sample as equal convolutions on square sides; a matrix product has sides of 1.

    Attributes:
        kernel, output, input: sides of the kernel, the output and the input.
        stride: of the kernel.
        inputs, outputs: channels of one of the convolutions.
        rows: outputs that share the weight besides the ``output ** 2`` positions.
        repeats: number of these convolutions, each with a weight of its own (groups, heads).
        shared: whether all samples use the same weight, so that a batch is one convolution of more rows.
    """

    kernel: int
    output: int
    input: int
    stride: int
    inputs: int
    outputs: int
    rows: int = 1
    repeats: int = 1
    shared: bool = True

    @property
    def macs(self) -> int:
        """Forward multiply-accumulates."""
        per_row = self.kernel**2 * self.inputs * self.outputs * self.output**2
        return per_row * self.rows * self.repeats


@dataclass
class Op:
    """One contraction of the model.

    Attributes:
        name: unique name; the path of the module that owns the weight, where there is one.
        kind: ``conv``, ``linear``, ``matmul``, ...; ``opaque`` for a module kept as one node.
        module: path of the module whose forward issued it.
        macs: forward multiply-accumulates for one sample; ``None`` where no formula is known.
        depthwise: whether it is a convolution of one channel a group.
        skip_path: whether it lies on the projection of its block's skip path. It then always runs: for samples that
            choose FW-0/BW-0 it takes the cheapest option that computes.
        input_gradient, weight_gradient: whether the backward pass computes EB and GC for it.
        product: the op in the form that a machine model prices; ``None`` if it has no such form.
        block: name of its block, or ``None``.
        precision: the decision of the precision pass.
    """

    name: str
    kind: str
    module: str
    macs: int | None
    depthwise: bool = False
    skip_path: bool = False
    input_gradient: bool = True
    weight_gradient: bool = True
    product: Product | None = None
    block: str | None = None
    precision: Decision = field(default_factory=lambda: Decision("float", "not yet decided"))

    def options(self, config: FracConfig) -> tuple[Precision, ...]:
        """The bits that its operands can have: by option, by stage, or by rule; none for a float op."""
        decision = self.precision
        if decision.mode == "gated":
            return config.projection_options if self.skip_path else config.gate_options
        if decision.mode == "scheduled":
            return decision.levels(config)
        return () if decision.precision is None else (decision.precision,)

    def weight_bits(self, config: FracConfig) -> int | None:
        """The bits that its weight has whatever its options are; ``None`` if it has their forward bits."""
        return config.gate_weight_bits if config.gated and self.precision.mode in ("gated", "scheduled") else None

    @property
    def training_macs(self) -> tuple[int, int, int]:
        """MACs of FW, EB and GC for one sample (0 where a gradient is not needed or the op is uncounted)."""
        macs = self.macs or 0
        return macs, macs * self.input_gradient, macs * self.weight_gradient


@dataclass
class Block:
    """Ops that share one precision choice.

    Attributes:
        name: path of the module that holds it (with a number where one module holds several).
        entry: name of the node the gate reads.
        exit: name of the residual add, or of the last op of a block without a skip path.
        skip: ``identity``, ``projection``, or ``None`` where the block cannot be skipped.
        ops: names of its ops, in order.
        macs: forward MACs of those for one sample.
        branches: names of the nodes that the add takes besides the skip path.
        gated: whether a gate chooses its precision.
        inseparable_because: the reason that samples that skip it cannot be left out; ``None`` if
            it can, or before ``FindSeparableBlocks`` has looked.
    """

    name: str
    entry: str
    exit: str
    skip: Literal["identity", "projection"] | None
    ops: tuple[str, ...]
    macs: int
    branches: tuple[str, ...] = ()
    gated: bool = False
    inseparable_because: str | None = None


@dataclass
class Facts:
    """The record of one node; each pass fills in its part.

    Attributes:
        shape, dtype: of the tensor at the example inputs; ``None`` if the value is not a tensor.
        layout: ``sparse`` or ``nested`` if the tensor is; a nested one has no shape here.
        channels_last: whether the channels of images are innermost in memory, in the model's own run.
        tensors: whether the value is a tensor or a structure that holds some.
        batch: its batch axis; ``None`` if all samples share the value, or if they are in mixed order.
        samples: the number of samples in its rows; ``None`` if all samples share the value.
        grows: whether a value that is not a tensor is proportional to the number of samples; ``None`` if it depends on
            that number in another way, or before ``FindSeparableBlocks`` has looked.
        flows: whether autograd would reach it if every parameter were trained. Paths of activations are such nodes.
        requires_grad: whether autograd does reach it.
        trained_by: the parameters through which it would, one bit each (:mod:`fractrain_fx.passes.analyse.trained`).
        gradients_by: for an op, the masks of its two factors, whose gradients are EB and GC.
        formula: for an op of two factors, gives its MACs for all samples from their shapes and that of the output.
        op: the contraction at this node.
        blocks: on an exit node, the blocks that end here.
        role: what an inserted node does.
        owner: the op or block that an inserted node serves.
    """

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    layout: str | None = None
    channels_last: bool = False
    tensors: bool = False
    batch: BatchAxis | None = None
    samples: int | None = None
    grows: bool | None = None
    flows: bool = False
    requires_grad: bool = False
    trained_by: int = 0
    gradients_by: tuple[int, int] | None = None
    formula: Callable[..., int] | None = None
    op: Op | None = None
    blocks: tuple[Block, ...] = ()
    role: Role | None = None
    owner: str | None = None


def facts(node: Node) -> Facts:
    """The record of a node, made at first use."""
    record = node.meta.setdefault("frac", Facts())
    assert isinstance(record, Facts)
    return record


def fixed_batch(graph_module: GraphModule) -> bool:
    """Whether the graph is known to run at one batch size only: samples are then not told apart."""
    return bool(graph_module.meta.get(FIXED_BATCH))


def ops_of(graph: Graph) -> Iterator[tuple[Node, Op]]:
    """Every contraction of a graph, in order."""
    for node in graph.nodes:
        op = facts(node).op
        if op is not None:
            yield node, op


def blocks_of(graph: Graph) -> list[Block]:
    """Every block of a graph, in order of its entry."""
    position = {node.name: index for index, node in enumerate(graph.nodes)}
    blocks = [block for node in graph.nodes for block in facts(node).blocks]
    return sorted(blocks, key=lambda block: (position[block.entry], position[block.exit]))


def choices_of(graph: Graph) -> dict[str, Node]:
    """The choice node of each gated block, by the block's name."""
    return {facts(node).owner or "": node for node in graph.nodes if facts(node).role == "choice"}
