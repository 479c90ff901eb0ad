"""The content of a report before it is drawn: panels of figures over named tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fractrain_fx.report.frames import Row
from fractrain_fx.report.spec import Spec

__all__ = ["Column", "Control", "Figure", "Panel", "Rendering", "Sheet", "Width", "width_of"]

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
class Rendering:
    """One way to draw a figure.

    Attributes:
        spec: Vega-Lite without data.
        data: names of its tables; the first is also shown as text.
        title: a title that is clear without its context.
    """

    spec: Spec
    data: tuple[str, ...]
    title: str


@dataclass(frozen=True)
class Figure:
    """A plot, its text alternative and its table.

    Attributes:
        key: name of its element and its files.
        summary: description of the plot in words.
        columns: columns of its table.
        variants: by the values of the panel's controls, joined by ``-``; ``""`` if the controls do not matter.
        where: filter for the rows of its table.
        pivot: the table's fields for rows, columns and values, if it is a matrix.
        width: share of the page's width: ``whole``, ``half`` or ``third``.
        plots: the variants that ``--plots`` writes.
        picks: a control, and the field of a clicked mark that sets it.
    """

    key: str
    summary: str
    columns: tuple[Column, ...]
    variants: Mapping[str, Rendering]
    where: Mapping[str, Any] = field(default_factory=dict)
    pivot: tuple[str, str, str] | None = None
    width: Width = "whole"
    plots: tuple[str, ...] = ("",)
    picks: tuple[str, str] | None = None


@dataclass(frozen=True)
class Control:
    """A choice that redraws a panel's figures; ``kind`` is ``select`` (a key of the variants) or ``epoch`` (a filter).

    ``choices`` are values with their labels; for an ``epoch`` control, the epochs with a button.
    """

    key: str
    label: str
    choices: Mapping[str, str]
    kind: str = "select"
    first: int = 1
    last: int = 1


@dataclass(frozen=True)
class Panel:
    """The content of one tab. ``notes`` name missing parts, and the reasons."""

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


def width_of(figures: int) -> Width:
    """The width of each of several figures side by side."""
    if figures == 1:
        return "whole"
    return "third" if figures % 3 == 0 else "half"
