"""The shapes and arrows of a drawing, independent of the file format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Arrow", "ArrowKind", "Picture", "Shape", "ShapeKind"]

ShapeKind = Literal["input", "output", "block", "op", "step", "add", "skip", "gate", "controller", "stage", "cost"]
ArrowKind = Literal["data", "skip", "reads", "choice", "state", "cost"]


@dataclass(frozen=True)
class Shape:
    """One shape in a drawing.

    Attributes:
        id: unique in its picture: kind and name.
        kind: a contraction is an ``op``; ``step`` stands for one or several calls in a row that multiply nothing;
            ``add`` is the end of a residual block, ``skip`` the select that drops its branch.
        title: name of the block or op, or of the calls.
        lines: short lines below the title.
        module: path of its module; "" for the model itself.
        block: the block that it belongs to or serves.
        mode: mode of a block or op: ``gated``, ``scheduled``, ``pinned``, ``float``, ``uncounted``, or ``mixed``.
        reason: the reason for the mode.
        ops: number of contractions.
        macs: forward MACs of one sample; ``None`` if nothing is multiplied or no formula is known.
        share: share of the model's MACs, 0..1.
        bits: lowest and highest bits (32: float), ``forward``, of the ``weight`` and ``backward``, of a block or op.
        tensors: the shapes of the tensors that enter and leave a block or op, if they are shown.
    """

    id: str
    kind: ShapeKind
    title: str
    lines: tuple[str, ...] = ()
    module: str = ""
    block: str | None = None
    mode: str | None = None
    reason: str = ""
    ops: int = 0
    macs: int | None = None
    share: float | None = None
    bits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    tensors: str = ""

    def facts(self) -> Iterator[tuple[str, str | int | float]]:
        """The known attributes of the shape, by name."""
        for name in ("kind", "title", "module", "block", "mode", "reason", "ops", "macs", "share", "tensors"):
            value = getattr(self, name)
            if value not in (None, "", 0):
                yield name, value
        for name, (low, high) in self.bits.items():
            yield f"{name}_bits_low", low
            yield f"{name}_bits_high", high


@dataclass(frozen=True)
class Arrow:
    """An arrow from one shape to another.

    ``data``: activations; ``skip``: activations past a block; ``reads``: the entry that a gate averages; ``choice``: a
    one-hot row for each sample; ``state``: the controller's LSTM state; ``cost``: choices that are summed.
    """

    source: str
    target: str
    kind: ArrowKind


@dataclass
class Picture:
    """Shapes in order of execution, and the arrows between them, each once.

    Attributes:
        title: the model's class and the method.
        blocks: blocks that are drawn as frames, by name, with their text.
    """

    title: str
    shapes: dict[str, Shape] = field(default_factory=dict)
    arrows: dict[Arrow, None] = field(default_factory=dict)
    blocks: dict[str, Shape] = field(default_factory=dict)

    def add(self, shape: Shape) -> str:
        """Add a shape; returns its id."""
        self.shapes[shape.id] = shape
        return shape.id

    def join(self, source: str, target: str, kind: ArrowKind) -> None:
        """Add an arrow, unless it exists or ends at its own start."""
        if source != target:
            self.arrows[Arrow(source, target, kind)] = None
