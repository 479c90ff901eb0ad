"""The chain of rewrites that makes a recorded model train with fractional precision."""

from __future__ import annotations

from torch.fx.passes.infra.pass_base import PassBase

from fractrain_fx.config import FracConfig
from fractrain_fx.passes.analyse.blocks import Blocks
from fractrain_fx.passes.analyse.macs import Macs
from fractrain_fx.passes.analyse.precision import DecidePrecision
from fractrain_fx.passes.analyse.separate import Separate
from fractrain_fx.passes.analyse.shapes import Shapes
from fractrain_fx.passes.execute.dispatch import Dispatch, undispatched
from fractrain_fx.passes.execute.fuse import Fuse, unfused
from fractrain_fx.passes.execute.fuse_skips import FuseSkips
from fractrain_fx.passes.execute.int8 import Lower, fused_ops, unlowered
from fractrain_fx.passes.execute.relu import Unmask
from fractrain_fx.passes.execute.torchao import Swap, unswapped
from fractrain_fx.passes.graph.facts import (
    FIXED_BATCH,
    TRAINED,
    Block,
    Decision,
    Facts,
    Op,
    Product,
    blocks_of,
    facts,
    fixed_batch,
    ops_of,
)
from fractrain_fx.passes.rewrite.attention import KeepAttention, OpenAttention
from fractrain_fx.passes.rewrite.cost import MeterCost, costed, reachable
from fractrain_fx.passes.rewrite.gate_size import GateSize, controller_size, gate_sizes
from fractrain_fx.passes.rewrite.gates import InsertGates
from fractrain_fx.passes.rewrite.mix_outputs import MixOutputs
from fractrain_fx.passes.rewrite.quantize import Quantize

__all__ = [
    "FIXED_BATCH",
    "TRAINED",
    "Block",
    "Blocks",
    "DecidePrecision",
    "Decision",
    "Dispatch",
    "Facts",
    "Fuse",
    "FuseSkips",
    "GateSize",
    "InsertGates",
    "KeepAttention",
    "Lower",
    "Macs",
    "MeterCost",
    "MixOutputs",
    "Op",
    "OpenAttention",
    "Product",
    "Quantize",
    "Separate",
    "Shapes",
    "Swap",
    "Unmask",
    "analysis_passes",
    "blocks_of",
    "controller_size",
    "costed",
    "default_passes",
    "facts",
    "fixed_batch",
    "fused_ops",
    "gate_sizes",
    "ops_of",
    "reachable",
    "undispatched",
    "unfused",
    "unlowered",
    "unswapped",
]


def analysis_passes(config: FracConfig) -> list[PassBase]:
    """The passes that only look: shapes, MACs, blocks, precisions, and what can run for a part of the samples."""
    attention: list[PassBase] = []
    if config.method != "float":
        attention = [OpenAttention() if config.attention == "quantized" else KeepAttention()]
    separating: list[PassBase] = [Separate(config.batch_axis)] if config.dispatches else []
    return [*attention, Shapes(config.batch_axis), Macs(), Blocks(), DecidePrecision(config), *separating]


def default_passes(config: FracConfig) -> list[PassBase]:
    """All passes in order, as a plain list: add, drop or reorder at will."""
    mixing: list[PassBase] = [MixOutputs(config)] if config.gated and config.mixing == "outputs" else []
    return [*analysis_passes(config), InsertGates(config), Quantize(config), *mixing, MeterCost(config)]
