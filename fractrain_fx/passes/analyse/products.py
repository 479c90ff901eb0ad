"""Describe each contraction as equal square convolutions, the form that a machine model prices (BITFUSION.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.fx import Node

from fractrain_fx.passes.graph.contractions import Contraction, operand
from fractrain_fx.passes.graph.facts import Product, facts

__all__ = ["product_of"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Matrices:
    """``count`` matrix products of ``rows x inputs`` with ``inputs x outputs``, over all samples of the example."""

    rows: int
    inputs: int
    outputs: int
    count: int = 1


def product_of(node: Node, family: Contraction, macs: int, shared: bool) -> Product | None:
    """One sample's share of a contraction as convolutions; ``None`` if it does not divide into equal ones.

    A square two-dimensional convolution stays a convolution. Everything else becomes matrix products: convolutions of
    side 1 with one position for each row. The result has the forward ``macs`` of one sample; ``shared``: the second
    operand is the same for all samples (a weight).
    """
    first, second = (operand(node, place) for place in family.operands)
    a, b, out = facts(first).shape, facts(second).shape, facts(node).shape
    samples = facts(node).samples or 1
    if a is None or b is None or out is None:
        return None
    product = _square_convolution(node, a, b, out) if family.kind == "conv" and samples == a[0] else None
    if product is None:
        matrices = _matrices(family, a, b, out, shared)
        product = None if matrices is None else _of_one_sample(matrices, samples, shared)
    return product if product is not None and product.macs == macs else None


def _square_convolution(node: Node, a: Shape, b: Shape, out: Shape) -> Product | None:
    stride, dilation = (operand(node, place) for place in ((3, "stride"), (5, "dilation")))
    strides, dilations = (_sides(setting, len(b) - 2) for setting in (stride, dilation))
    square = len(b) == 4 and all(len(set(sides)) == 1 for sides in (a[2:], b[2:], out[2:], strides, dilations))
    if not square or dilations[0] != 1:
        return None
    groups = a[1] // b[1]
    return Product(b[2], out[2], a[2], strides[0], b[1], b[0] // groups, repeats=groups)


def _sides(setting: object, count: int) -> tuple[int, ...]:
    """A setting of a convolution for each of its dimensions."""
    if isinstance(setting, tuple | list):
        return tuple(setting) * (count if len(setting) == 1 else 1)
    return (setting if isinstance(setting, int) else 1,) * count


def _matrices(family: Contraction, a: Shape, b: Shape, out: Shape, shared: bool) -> _Matrices | None:
    if family.kind == "conv":
        groups = a[1] // b[1]
        return _Matrices(out[0] * math.prod(out[2:]), math.prod(b[1:]), b[0] // groups, groups)
    if family.kind == "conv_transpose":
        groups = out[1] // b[1]
        return _Matrices(a[0] * math.prod(a[2:]), a[1] // groups, math.prod(b[1:]), groups)
    if family.kind == "linear":
        return _Matrices(math.prod(a[:-1]), a[-1], b[0])
    if family.kind == "einsum":
        channels = b[family.channel]
        terms = family.macs(a, b, out) // math.prod(out)
        return _Matrices(math.prod(out) // channels, terms, channels)
    if family.kind == "grouped_mm" or min(len(a), len(b)) < 2:
        return None  # each row picks its matrix, or an operand is a vector
    if shared and len(b) == 2:
        return _Matrices(math.prod(a[:-1]), a[-1], b[-1])
    return _Matrices(a[-2], a[-1], b[-1], math.prod(out[:-2]))


def _of_one_sample(matrices: _Matrices, samples: int, shared: bool) -> Product | None:
    """One sample's part: some of the rows if all samples share a matrix, else some of the matrices."""
    rows, count = matrices.rows, matrices.count
    if shared and rows % samples == 0:
        rows //= samples
    elif count % samples == 0:
        count //= samples
    else:
        return None
    return Product(1, 1, 1, 1, matrices.inputs, matrices.outputs, rows=rows, repeats=count, shared=shared)
