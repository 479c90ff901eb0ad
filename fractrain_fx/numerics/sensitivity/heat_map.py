"""A heat map of sensitivities: ops downwards, operands and widths across, darker where rounding harms more."""

from __future__ import annotations

import math
from collections.abc import Iterator
from xml.sax.saxutils import escape

from fractrain_fx.numerics.sensitivity.result import Sensitivities, Sensitivity
from fractrain_fx.numerics.sensitivity.rounded import OPERANDS

__all__ = ["heat_map"]

_CELL, _LINE, _NAMES, _TOP = 34, 18, 260, 44
_DECADES = 6.0  # below the largest value, which are shown in shades
_TITLES = {"x": "activations", "w": "weights", "g": "gradients"}


def heat_map(found: Sensitivities) -> str:
    """An SVG; activations and weights share a scale, gradients have their own."""
    bits = sorted({row.bits for row in found.rows})
    names = [op.name for op in found.measured]
    width = _NAMES + len(OPERANDS) * (len(bits) * _CELL + 12)
    height = _TOP + len(names) * _LINE + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="11">',
        f"<title>{escape(found.model)}: what rounding does to the loss</title>",
        *_heads(bits),
        *(
            f'<text x="{_NAMES - 8}" y="{_TOP + row * _LINE + 13}" text-anchor="end">{escape(name[-40:])}</text>'
            for row, name in enumerate(names)
        ),
        *_cells(found, names, bits),
        "</svg>",
    ]
    return "\n".join(lines)


def _heads(bits: list[int]) -> Iterator[str]:
    for place, operand in enumerate(OPERANDS):
        yield f'<text x="{_left(place, len(bits))}" y="16">{_TITLES[operand]}</text>'
        for column, width in enumerate(bits):
            x = _left(place, len(bits)) + column * _CELL + _CELL // 2
            yield f'<text x="{x}" y="36" text-anchor="middle">{width}</text>'


def _cells(sensitivities: Sensitivities, names: list[str], bits: list[int]) -> Iterator[str]:
    highest = {
        kind: max((_value(row) for row in sensitivities.rows if (row.operand == "g") == kind), default=0.0)
        for kind in (False, True)
    }
    for row in sensitivities.rows:
        value, top = _value(row), highest[row.operand == "g"]
        x = _left(OPERANDS.index(row.operand), len(bits)) + bits.index(row.bits) * _CELL
        y = _TOP + names.index(row.op) * _LINE
        words = f"{row.op}, {_TITLES[row.operand]} at {row.bits} bits: {_words(row)}"
        yield (
            f'<rect x="{x}" y="{y}" width="{_CELL - 2}" height="{_LINE - 2}" fill="{_shade(value, top)}">'
            f"<title>{escape(words)}</title></rect>"
        )


def _left(place: int, columns: int) -> int:
    return _NAMES + place * (columns * _CELL + 12)


def _value(row: Sensitivity) -> float:
    return max(0.0, (row.change if row.noise is None else row.noise) or 0.0)


def _words(row: Sensitivity) -> str:
    if row.noise is not None:
        return f"{100 * row.noise:.3g} % of the harm of the batch's noise"
    return f"{row.change:+.3g} in the loss"


def _shade(value: float, top: float) -> str:
    """From white to dark red, by the logarithm."""
    share = 0.0 if value <= 0 or top <= 0 else max(0.0, 1 + math.log10(value / top) / _DECADES)
    green = round(245 - 205 * share)
    return f"rgb({round(250 - 80 * share)},{green},{green})"
