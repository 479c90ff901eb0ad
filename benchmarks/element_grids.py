"""Draw the values of the small floating-point elements: ``python -m benchmarks.element_grids docs/formats.svg``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from fractrain_fx.formats.microscaling import ELEMENTS
from fractrain_fx.formats.microscaling.elements import round_to_grid

WIDTH, ROW, LEFT, RIGHT = 760, 34, 70, 20
LEAST = -5  # the exponent at the left end; zero and smaller values are left out


def values(name: str) -> list[float]:
    """The values of an element from ``2^LEAST`` to its largest, relative to its largest."""
    element = ELEMENTS[name]
    fine = torch.linspace(0, 1, 1 << 14) * element.largest
    found = round_to_grid(fine, element.grid).unique() / 2.0**element.top
    return [value for value in found.tolist() if value >= 2.0**LEAST]


def drawing() -> str:
    """The grids below one another on a logarithmic axis, the largest power of two of each at 1."""
    low, high = LEAST, 1

    def place(value: float) -> float:
        exponent = torch.tensor(value).log2().item()
        return LEFT + (WIDTH - LEFT - RIGHT) * (exponent - low) / (high - low)

    height = ROW * (len(ELEMENTS) + 1) + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"',
        '  font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for row, name in enumerate(ELEMENTS):
        y = ROW * row + 24
        lines.append(f'<text x="10" y="{y + 5}">{name}</text>')
        lines.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="#ccc"/>')
        lines += [f'<path d="M{place(each):.1f} {y - 9}v18" stroke="#2a6f97"/>' for each in values(name)]
    y = ROW * len(ELEMENTS) + 24
    for exponent in range(low, high + 1):
        label = f"2^{exponent}" if exponent else "1"
        lines.append(f'<text x="{place(2.0**exponent):.1f}" y="{y}" text-anchor="middle" fill="#555">{label}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(drawing(), encoding="utf-8")
