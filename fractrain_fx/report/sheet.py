"""What a report consists of, before anything is drawn: panels of figures over named tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fractrain_fx.report.frames import Row

__all__ = ["Column", "Control", "Figure", "Panel", "Sheet", "Variant", "Width", "width_of"]

Spec = dict[str, Any]
Width = Literal["whole", "half", "third"]


@dataclass(frozen=True)
class Column:
    """A column of the table behind a plot.

    ``format``: ``g6`` six significant digits, ``e4`` a power of ten with four decimals, ``f1`` one decimal, ``d`` a
    whole number, empty for text.
    """

    field: str
    title: str
    format: str = ""


@dataclass(frozen=True)
class Variant:
    """One way to draw a figure.

    Attributes:
        spec: Vega-Lite without data.
        data: names of the tables that it reads; the first is the one shown as text.
        title: what it is, for a reader who sees nothing else.
    """

    spec: Spec
    data: tuple[str, ...]
    title: str


@dataclass(frozen=True)
class Figure:
    """A plot, its text alternative and its table.

    Attributes:
        key: name of its element and its files.
        summary: what can be seen in it, in words.
        columns: of its table.
        variants: by the values of the panel's controls, joined by ``-``; one under ``""`` where none matter.
        where: the rows of the table that belong to it.
        pivot: the table's fields for rows, columns and values, where it is a matrix.
        width: how much of the page's width it takes: ``whole``, ``half`` or ``third``.
        plots: the variants that ``--plots`` writes.
    """

    key: str
    summary: str
    columns: tuple[Column, ...]
    variants: Mapping[str, Variant]
    where: Mapping[str, Any] = field(default_factory=dict)
    pivot: tuple[str, str, str] | None = None
    width: Width = "whole"
    plots: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class Control:
    """A choice that redraws a panel's figures; ``kind`` is ``select`` (a key of the variants) or ``epoch`` (a filter).

    ``choices`` are values with their labels; of an ``epoch`` control, the epochs that have a button.
    """

    key: str
    label: str
    choices: Mapping[str, str]
    kind: str = "select"
    first: int = 1
    last: int = 1


@dataclass(frozen=True)
class Panel:
    """What one tab shows. ``notes`` say what is missing, and why."""

    key: str
    title: str
    text: str
    figures: tuple[Figure, ...]
    controls: tuple[Control, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sheet:
    """The panels, and the tables that their figures name."""

    panels: tuple[Panel, ...]
    tables: Mapping[str, list[Row]]

    def figures(self) -> Iterator[Figure]:
        """Every figure of every panel."""
        for panel in self.panels:
            yield from panel.figures


def width_of(figures: int) -> Width:
    """The width of each of several figures that stand together."""
    if figures == 1:
        return "whole"
    return "third" if figures % 3 == 0 else "half"
