"""MACs of contractions from the shapes of their factors: closed forms for whole tensors (all samples)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import FlopCounterMode

from fractrain_fx.passes.graph.facts import facts

__all__ = [
    "Shape",
    "attention",
    "batch_sum",
    "bilinear",
    "convolution",
    "counted_by_torch",
    "deformable_convolution",
    "einsum",
    "einsum_terms",
    "grouped",
    "outer",
    "per_output",
    "recurrent_macs",
    "temporal_convolution",
    "tensordot",
    "transposed_convolution",
]

Shape = tuple[int, ...]


def per_output(a: Shape, b: Shape, out: Shape) -> int:
    """Every output element sums over the last dimension of the first operand."""
    return math.prod(out) * a[-1]


def convolution(a: Shape, b: Shape, out: Shape) -> int:
    """Every output element sums over one filter (``in_channels / groups`` times the kernel)."""
    return math.prod(out) * math.prod(b[1:])


def transposed_convolution(a: Shape, b: Shape, out: Shape) -> int:
    """Every input element meets one filter (``out_channels / groups`` times the kernel)."""
    return math.prod(a) * math.prod(b[1:])


def temporal_convolution(a: Shape, b: Shape, out: Shape) -> int:
    """``conv_tbc``: every output element sums over a filter of kernel times input channels."""
    return math.prod(out) * math.prod(b[:2])


def grouped(a: Shape, b: Shape, out: Shape) -> int:
    """Each row meets the matrix of its group (expert); two flat operands are grouped along the summed dimension."""
    return a[0] * a[1] * b[1] if len(a) == len(b) == 2 else per_output(a, b, out)


def outer(a: Shape, b: Shape, out: Shape) -> int:
    """Every output element is one product."""
    return math.prod(out)


def batch_sum(a: Shape, b: Shape, out: Shape) -> int:
    """``addbmm``: one matrix product for each of the matrices that are added up."""
    return math.prod(a) * b[-1]


def tensordot(a: Shape, b: Shape, out: Shape) -> int:
    """Every output element sums over the shared dimensions, which both operands have and the output has not."""
    return math.prod(out) * math.isqrt(math.prod(a) * math.prod(b) // max(math.prod(out), 1))


def einsum_terms(equation: str) -> tuple[list[str], str]:
    """The letters of each operand and of the output; without ``->`` the output has the letters that occur once."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow:
        letters = inputs.replace(",", "").replace("...", "")
        output = "..." * ("..." in inputs) + "".join(sorted(x for x in set(letters) if letters.count(x) == 1))
    return terms, output


def einsum(equation: str) -> Callable[[Shape, Shape, Shape], int]:
    """For two operands: one MAC for each combination of indices, except indices that one operand sums beforehand."""
    terms, output = einsum_terms(equation)

    def macs(a: Shape, b: Shape, out: Shape) -> int:
        sizes: dict[str, int] = {}
        for term, shape in zip(terms, (a, b), strict=True):
            named = term.replace("...", "")
            before = term.find("...") if "..." in term else len(named)
            after = len(named) - before
            for letter, size in (
                *zip(named[:before], shape[:before], strict=False),
                *zip(named[before:], shape[len(shape) - after :], strict=False),
            ):
                sizes[letter] = max(sizes.get(letter, 1), size)
            if "..." in term:
                sizes["..."] = max(sizes.get("...", 1), math.prod(shape[before : len(shape) - after]))
        return math.prod(
            size
            for letter, size in sizes.items()
            if letter == "..." or letter in output or (letter in terms[0] and letter in terms[1])
        )

    return macs


def attention(shapes: Sequence[Shape], out: Shape) -> int:
    """``scaled_dot_product_attention``: every query meets every key and every value, masked (causal) ones included.

    Grouped heads (GQA) count once for each head of the queries, as each of these meets its keys.
    """
    query, key, value = shapes[:3]
    return math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def bilinear(shapes: Sequence[Shape], out: Shape) -> int:
    """The first input meets the whole weight, and what comes out meets the second input."""
    first, second, _ = shapes[:3]
    return math.prod(out) * second[-1] * (first[-1] + 1)


def deformable_convolution(shapes: Sequence[Shape], out: Shape) -> int:
    """The MACs of a convolution; the interpolation between positions is not counted."""
    return math.prod(out) * math.prod(shapes[1][1:])


def counted_by_torch(node: Node) -> int | None:
    """MACs of a call that multiplies several tensors in an order that torch chooses, from torch's own counter.

    The call is made on the meta device. ``None`` if an argument is neither a tensor nor a constant.
    """
    if any(facts(source).shape is None for source in node.all_input_nodes):
        return None

    def stand_in(source: Node) -> Tensor:
        record = facts(source)
        return torch.empty(record.shape or (), dtype=record.dtype, device="meta")

    args, kwargs = map_arg((node.args, node.kwargs), stand_in)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        assert callable(node.target)
        node.target(*args, **kwargs)
    return int(counter.get_total_flops()) // 2


def recurrent_macs(owner: nn.Module, shape: Shape) -> int:
    """MACs of torch's recurrent layers and cells: every step of every sequence meets each of their matrices once.

    ``shape`` is that of the input, features last.
    """
    matrices = sum(parameter.numel() for parameter in owner.parameters() if parameter.ndim >= 2)
    return math.prod(shape[:-1]) * matrices
