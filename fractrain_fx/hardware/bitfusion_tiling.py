"""Cut a convolution into tiles on BitFusion, and count the bits that each loop order moves between DRAM and SRAM.

Arrays hold all tilings and loop orders of a layer: one value for each tiling, or ``[orders, tilings]`` if the loop
order matters. Amounts are in bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "INPUT_UNITS",
    "OUTPUT_BITS",
    "OUTPUT_UNITS",
    "DramTraffic",
    "NativeConvolution",
    "Tilings",
    "ceil_div",
    "dram_traffic",
    "tilings",
]

Ints = NDArray[np.int64]

INPUT_UNITS, OUTPUT_UNITS = 16, 32  # fusion units along the array's two sides
OUTPUT_BITS = 32  # of outputs and partial sums

# SRAMs are double-buffered: while one half computes, the other is filled.
_HALF_SRAM = {"weights": 64 * 1024 * 8 // 2, "activations": 32 * 1024 * 8 // 2, "outputs": 16 * 1024 * 8 // 2}
_LOOPS_OF = {"weights": ("ic", "oc"), "activations": ("b", "o", "ic"), "outputs": ("b", "o", "oc")}
# Rows and columns of positions are cut in the same way, so 60 of the 120 orders differ.
_ORDERS = sorted(set(permutations(("b", "o", "o", "ic", "oc"))))


@dataclass(frozen=True)
class NativeConvolution:
    """A convolution whose operands the array multiplies natively (at most 8 bits)."""

    K: int
    O: int
    S: int
    IC: int
    OC: int
    B: int
    a_bits: int
    w_bits: int
    im2col: bool = False

    @property
    def inputs_at_once(self) -> int:
        """Products that one column of the array sums in a cycle: narrow operands share a fusion unit."""
        return INPUT_UNITS * (8 // max(self.a_bits, 2)) * (8 // max(self.w_bits, 2))


@dataclass(frozen=True)
class Tilings:
    """The tilings whose tiles fit the SRAMs.

    ``size`` has samples (``b``), output side (``o``) and channels (``ic``, ``oc``) of a tile, ``number`` the tiles
    along each of these loops, ``bits`` the bits of a tile of each tensor. ``count`` is the number of all tiles,
    ``compute`` the cycles of the whole layer in which the array computes.
    """

    size: dict[str, Ints]
    number: dict[str, Ints]
    bits: dict[str, Ints]
    count: Ints
    compute: Ints


@dataclass(frozen=True)
class DramTraffic:
    """Bits between DRAM and SRAM, ``[orders, tilings]``: the total of each tensor, and those of one fill."""

    total: dict[str, Ints]
    fill: dict[str, Ints]


def ceil_div(a: Ints, b: Ints | int) -> Ints:
    """``a / b`` rounded up, exact also for negative ``a``."""
    return -(-a // b)


def tilings(layer: NativeConvolution) -> Tilings:
    """All tilings that fit half of each SRAM; sides are powers of two, or the whole side."""
    K, q = layer.K, layer.inputs_at_once
    whole = {"b": layer.B, "o": layer.O, "ic": layer.IC, "oc": layer.OC}
    first = {"b": 1, "o": 1, "ic": 1, "oc": OUTPUT_UNITS}
    grid = np.meshgrid(*(_sides(first[loop], whole[loop]) for loop in whole), indexing="ij")
    size = {loop: axis.ravel() for loop, axis in zip(whole, grid, strict=True)}
    b, o, ic, oc = size.values()
    rows = ceil_div(oc, OUTPUT_UNITS)
    bits = {
        "weights": ceil_div(K**2 * ic, q) * q * oc * layer.w_bits,
        "activations": (K + (o - 1) * layer.S) ** 2 * ic * b * layer.a_bits,
        "outputs": o**2 * rows * OUTPUT_UNITS * b * OUTPUT_BITS,
    }
    number = {loop: ceil_div(np.full_like(b, whole[loop]), size[loop]) for loop in whole}
    count = number["b"] * number["o"] ** 2 * number["ic"] * number["oc"]
    steps = ceil_div(K**2 * ic, q) if layer.im2col else K**2 * ceil_div(ic, q)
    compute = count * b * rows * o**2 * steps
    fits = np.logical_and.reduce([bits[tensor] <= _HALF_SRAM[tensor] for tensor in bits])

    def fitting(columns: dict[str, Ints]) -> dict[str, Ints]:
        return {name: column[fits] for name, column in columns.items()}

    return Tilings(fitting(size), fitting(number), fitting(bits), count[fits], compute[fits])


def dram_traffic(tiles: Tilings) -> DramTraffic:
    """The traffic of each loop order. A tensor stays in its SRAM for as many inner loops as it fits."""
    moved = {tensor: _moved(tiles, tensor) for tensor in _LOOPS_OF}
    return DramTraffic(
        total={tensor: total for tensor, (total, _) in moved.items()},
        fill={tensor: fill for tensor, (_, fill) in moved.items()},
    )


def _moved(tiles: Tilings, tensor: str) -> tuple[Ints, Ints]:
    """Bits of ``tensor`` moved in total, and moved until its SRAM is filled: ``[orders, tilings]``."""
    total = fill = np.tile(tiles.bits[tensor], (len(_ORDERS), 1))
    resident = np.ones(total.shape, dtype=bool)
    for loops in zip(*_ORDERS, strict=True):  # from the innermost of each order to the outermost
        number = np.stack([tiles.number[loop] for loop in loops])
        relevant = np.array([loop in _LOOPS_OF[tensor] for loop in loops])[:, None]
        total = np.where(relevant | ~resident, total * number, total)
        resident &= ~relevant | (total <= _HALF_SRAM[tensor])
        fill = np.where(relevant & resident, total, fill)
    return total, fill


def _sides(first: int, whole: int) -> Ints:
    """``first`` and its doubles up to ``whole``, which is the last side."""
    sides = [min(first, whole)]
    while sides[-1] < whole:
        sides.append(min(2 * sides[-1], whole))
    return np.array(sides, dtype=np.int64)
