"""Blocks and ops as a tree of rows, nested by module path."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from fractrain_fx.passes import Block, GateSize, Op
from fractrain_fx.passes.graph.facts import STAGE

__all__ = ["COLUMNS", "Row", "tree", "within_block"]

COLUMNS = ("block", "ops", "skip", "MACs", "share", "gate params", "gate MACs", "precision, and why")
"""Headings of ``Row.cells``."""


@dataclass
class Row:
    """One line of the table.

    Attributes:
        name: path of a module or block; for an op, its name without its block's, and its kind.
        kind: ``module`` (the sum of its rows), ``block`` or ``op``.
        ops: number of contractions.
        macs: forward MACs of one sample; ``None`` if no formula is known.
        total: MACs of the whole model, of which ``macs`` are a share.
        skip, gate: skip path and gate of a block.
        precision: the precision in words; empty for a module.
        shapes: the shapes of its inputs and output in words; empty if they are not shown.
        below: rows inside this one.
    """

    name: str
    kind: str
    total: int
    ops: int = 0
    macs: int | None = 0
    skip: str | None = None
    gate: GateSize | None = None
    precision: str = ""
    shapes: str = ""
    below: list[Row] = field(default_factory=list)

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of the row under ``COLUMNS``, as text."""
        share = "" if self.macs is None else f"{100 * self.macs / max(self.total, 1):.1f} %"
        return (
            self.name,
            "" if self.kind == "op" else str(self.ops),
            (self.skip or "-") if self.kind == "block" else "",
            "uncounted" if self.macs is None else f"{self.macs:,}",
            share,
            f"{self.gate.parameters:,}" if self.gate else "",
            f"{self.gate.macs:,}" if self.gate else "",
            "\n".join(part for part in (self.precision, self.shapes) if part),
        )

    def walk(self, depth: int = 0) -> Iterator[tuple[Row, int]]:
        """This row and all below it, in order, each with its depth."""
        yield self, depth
        for row in self.below:
            yield from row.walk(depth + 1)


def tree(
    blocks: Sequence[Block],
    ops: Sequence[Op],
    gates: Mapping[str, GateSize],
    options: Sequence[str],
    shapes: Mapping[str, str],
    *,
    show_ops: bool,
) -> list[Row]:
    """Rows for every block and for every op outside of blocks, in order; with ``show_ops`` for every op."""
    total = sum(op.macs or 0 for op in ops)
    order = {op.name: index for index, op in enumerate(ops)}
    placed = []
    for block in blocks:
        own = [op for op in ops if op.block == block.name]
        row = Row(block.name, "block", total, len(own), block.macs, block.skip, gates.get(block.name))
        row.precision, row.shapes = _precisions(block, own, options), shapes.get(block.name, "")
        if show_ops:
            row.below = [_op_row(op, within_block(op.name, block.name), total, shapes) for op in own]
        placed.append((order[block.ops[0]], block.name, row))
    placed += [(order[op.name], op.name, _op_row(op, op.name, total, shapes)) for op in ops if op.block is None]
    top = Row("", "module", total)
    for _, path, row in sorted(placed, key=lambda entry: entry[0]):
        _hang(top, path, row)
    _sum_up(top)
    return _joined(top).below


def _op_row(op: Op, name: str, total: int, shapes: Mapping[str, str]) -> Row:
    precision = op.precision.words
    if op.precision.mode == "gated":  # the block's row names the gate
        precision = "gated; on the skip path, so it always runs" if op.skip_path else "gated"
    return Row(f"{name} ({op.kind})", "op", total, 1, op.macs, precision=precision, shapes=shapes.get(op.name, ""))


def within_block(op: str, block: str) -> str:
    """An op's name without the modules that it has in common with its block.

    The second block of the module ``layers.0`` is named ``layers.0_1``.
    """
    module = block if op.startswith(f"{block}.") else re.sub(r"_\d+$", "", block)
    parts, others = op.split("."), module.split(".")
    common = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(parts, others, strict=False))))
    return ".".join(parts[common:]) or op


def _precisions(block: Block, ops: list[Op], options: Sequence[str]) -> str:
    """The precisions of a block's ops in words: one if all agree, otherwise with counts."""
    words: dict[str, int] = {}
    for op in ops:
        word = op.precision.words
        if op.precision.mode == "gated":
            usable = [option for option in options if block.skip is not None or option != "FW-0/BW-0"]
            word = f"gated: {len(usable)} options{'' if len(usable) == len(options) else ', cannot skip'}"
        elif op.precision.reason == STAGE:
            word = f"scheduled: {len(options)} stage{'s' if len(options) != 1 else ''}"
        words[word] = words.get(word, 0) + 1
    if len(words) == 1:
        return next(iter(words))
    return "; ".join(f"{count} {word}" for word, count in words.items())


def _hang(top: Row, path: str, row: Row) -> None:
    """Put a row below the rows of the modules in its path."""
    modules = path.split(".")[:-1]
    for depth in range(1, len(modules) + 1):
        name = ".".join(modules[:depth])
        module = next((other for other in top.below if other.name == name and other.kind == "module"), None)
        if module is None:
            module = Row(name, "module", top.total)
            top.below.append(module)
        top = module
    top.below.append(row)


def _sum_up(row: Row) -> None:
    for child in row.below:
        if child.kind == "module":
            _sum_up(child)
    row.macs = sum(child.macs or 0 for child in row.below)
    row.ops = sum(child.ops for child in row.below)


def _joined(row: Row) -> Row:
    """The row without modules that have only one row below them."""
    below = [_joined(child) if child.kind == "module" else child for child in row.below]
    row.below = [child.below[0] if child.kind == "module" and len(child.below) == 1 else child for child in below]
    return row
