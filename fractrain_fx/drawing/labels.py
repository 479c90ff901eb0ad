"""The text on the shapes of a drawing."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule, Node

from fractrain_fx.config import FracConfig
from fractrain_fx.config.precision import FLOAT_BITS
from fractrain_fx.drawing.picture import Shape
from fractrain_fx.passes import Block, Op
from fractrain_fx.passes.graph.contractions import function_name
from fractrain_fx.passes.graph.facts import STAGE
from fractrain_fx.summary.rows import within_block

__all__ = ["amount", "bits_text", "block_shape", "op_shape", "short"]

_LISTED = 4


def amount(count: int) -> str:
    """A number of MACs in three digits: 44.0 M."""
    value, unit = float(count), ""
    for unit in ("", " k", " M", " G", " T"):
        if value < 999.5 or unit == " T":
            break
        value /= 1000
    digits = 0 if unit == "" else max(0, 3 - len(str(int(value))))
    return f"{value:.{digits}f}{unit}"


def bits_text(bits: tuple[int, int]) -> str:
    """``2-6``, or one number if both are equal; 32 is ``float``."""
    low, high = ("float" if width == FLOAT_BITS else str(width) for width in bits)
    return low if low == high else f"{low}-{high}"


def op_shape(op: Op, config: FracConfig, total: int, tensors: str = "") -> Shape:
    """The shape of one contraction; its frame has the names of its block and module.

    ``tensors``: a line about the shapes of its tensors.
    """
    title = within_block(op.name, op.block) if op.block else op.name
    lines: tuple[str, ...] = (
        ("uncounted",) if op.macs is None else (f"{amount(op.macs)} MACs, {_share(op.macs, total)}",)
    )
    reason = op.precision.reason
    if op.precision.mode != "gated" and reason != STAGE:
        lines += (f"{op.precision.mode}: {reason}",)
    lines += (tensors,) if tensors else ()
    return Shape(
        f"op {op.name}",
        "op",
        f"{title} ({op.kind})",
        lines,
        op.module,
        op.block,
        op.precision.mode,
        reason,
        1,
        op.macs,
        (op.macs or 0) / max(total, 1),
        _bits(op, config),
        tensors,
    )


def block_shape(block: Block, ops: Sequence[Op], config: FracConfig, total: int, tensors: str = "") -> Shape:
    """The shape of a whole block; its bits are the lowest and highest of its ops.

    ``tensors``: a line about the shapes of its tensors.
    """
    modes = list(dict.fromkeys(op.precision.mode for op in ops))
    reasons = "; ".join(dict.fromkeys(op.precision.reason for op in ops))
    names = [within_block(op.name, block.name) for op in ops]
    more = f" + {len(names) - _LISTED}" if len(names) > _LISTED else ""
    listed = "" if names == [block.name] else ", ".join(names[:_LISTED]) + more
    skip = f"{block.skip} skip" if block.skip else "cannot be skipped"
    cost = f"{amount(block.macs)} MACs, {_share(block.macs, total)}"
    lines = (cost, listed, tensors, f"{_precision(modes, reasons)}; {skip}")
    bits = [_bits(op, config) for op in ops]
    return Shape(
        f"block {block.name}",
        "block",
        block.name,
        tuple(line for line in lines if line),
        block.name,
        block.name,
        modes[0] if len(modes) == 1 else "mixed",
        reasons,
        len(ops),
        block.macs,
        block.macs / max(total, 1),
        {name: _span([of_op[name] for of_op in bits]) for name in bits[0]},
        tensors,
    )


def short(node: Node, graph_module: GraphModule) -> str:
    """A call in a word: the module's name and class, or the function's name."""
    if node.op == "call_module":
        kind = type(graph_module.get_submodule(str(node.target))).__name__
        return f"{str(node.target).rpartition('.')[2]} ({kind})"
    return function_name(node)


def _precision(modes: Sequence[str], reasons: str) -> str:
    return f"{modes[0]}: {reasons}" if list(modes) in (["float"], ["pinned"]) else " and ".join(modes)


def _share(macs: int, total: int) -> str:
    return f"{100 * macs / max(total, 1):.1f} %"


def _bits(op: Op, config: FracConfig) -> dict[str, tuple[int, int]]:
    """Lowest and highest forward, weight and backward bits that an op computes with."""
    computing = [option for option in op.options(config) if not option.skips]
    if not computing:
        return dict.fromkeys(("forward", "weight", "backward"), (FLOAT_BITS, FLOAT_BITS))
    forward = min(option.fw for option in computing), max(option.fw for option in computing)
    backward = min(option.bw for option in computing), max(option.bw for option in computing)
    fixed = op.weight_bits(config)
    return {"forward": forward, "weight": forward if fixed is None else (fixed, fixed), "backward": backward}


def _span(spans: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return min(low for low, _ in spans), max(high for _, high in spans)
