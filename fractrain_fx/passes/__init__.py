"""The three chains of passes: analysis, the rewrite of the shown graph, and the copy of that graph that runs."""

from __future__ import annotations

from torch.fx.passes.infra.pass_base import PassBase

from fractrain_fx.config import FracConfig
from fractrain_fx.execution.codes.timing import Tuner
from fractrain_fx.passes.analyse.blocks import Blocks
from fractrain_fx.passes.analyse.macs import Macs
from fractrain_fx.passes.analyse.precision import DecidePrecision
from fractrain_fx.passes.analyse.separate import FindSeparableBlocks
from fractrain_fx.passes.analyse.shapes import Shapes
from fractrain_fx.passes.execute.backend import ChooseBackend, not_on_int8, not_on_torchao
from fractrain_fx.passes.execute.dispatch import Dispatch, undispatched
from fractrain_fx.passes.execute.fuse import Fuse, fused_ops, unfused
from fractrain_fx.passes.execute.fuse_skips import FuseSkips
from fractrain_fx.passes.execute.memory_format import ChannelsLast
from fractrain_fx.passes.execute.relu import ReplaceReLUs
from fractrain_fx.passes.execute.remake import RemakeOperands
from fractrain_fx.passes.graph.facts import (
    FIXED_BATCH,
    KNOWN,
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
from fractrain_fx.passes.rewrite.attention import OpenAttention
from fractrain_fx.passes.rewrite.cost import MeterCost, costed, reach_of
from fractrain_fx.passes.rewrite.gate_size import GateSize, controller_size, gate_sizes
from fractrain_fx.passes.rewrite.gates import InsertGates
from fractrain_fx.passes.rewrite.quantize import Quantize

__all__ = [
    "FIXED_BATCH",
    "KNOWN",
    "TRAINED",
    "Block",
    "Blocks",
    "ChannelsLast",
    "ChooseBackend",
    "DecidePrecision",
    "Decision",
    "Dispatch",
    "Facts",
    "FindSeparableBlocks",
    "Fuse",
    "FuseSkips",
    "GateSize",
    "InsertGates",
    "Macs",
    "MeterCost",
    "Op",
    "OpenAttention",
    "Product",
    "Quantize",
    "RemakeOperands",
    "ReplaceReLUs",
    "Shapes",
    "analysis_passes",
    "blocks_of",
    "controller_size",
    "costed",
    "default_passes",
    "execution_passes",
    "facts",
    "fixed_batch",
    "fused_ops",
    "gate_sizes",
    "not_on_int8",
    "not_on_torchao",
    "ops_of",
    "reach_of",
    "undispatched",
    "unfused",
]


def analysis_passes(config: FracConfig) -> list[PassBase]:
    """The passes that look: they open fused attention, and note shapes, MACs, blocks, precisions, separable blocks."""
    opens = config.method != "float" and config.attention == "quantized"
    attention: list[PassBase] = [OpenAttention()] if opens else []
    separating: list[PassBase] = [FindSeparableBlocks(config.run.batch_axis)] if config.dispatches else []
    return [*attention, Shapes(config.run.batch_axis), Macs(), Blocks(), DecidePrecision(config), *separating]


def default_passes(config: FracConfig) -> list[PassBase]:
    """All passes in order, as a plain list: add, drop or reorder at will."""
    formats = {config.format, *(pin.number_format or config.format for pin in config.pins)}
    fusing: list[PassBase] = [Fuse(per_product=True)] if any(map(config.rounds_anew, formats)) else []
    return [*analysis_passes(config), InsertGates(config), Quantize(config), MeterCost(config), *fusing]


def execution_passes(config: FracConfig, tuner: Tuner | None = None, place: str = "dispatched") -> list[PassBase]:
    """The passes that turn a copy of the shown graph into the graph that runs.

    Args:
        config: says how fused ops and skipped blocks run.
        tuner: chooses between float and int8; a new one by default.
        place: path under ``frac.`` for the skipped blocks of this graph.
    """
    passes: list[PassBase] = [Fuse(), ReplaceReLUs()]
    if config.run.memory_format == "auto":
        passes.append(ChannelsLast())
    passes.append(ChooseBackend(config, tuner))
    if config.dispatches and config.run.left_out_from is not None:
        passes.append(Dispatch(config.run.left_out_from, place))
    return [*passes, RemakeOperands(), FuseSkips()]
