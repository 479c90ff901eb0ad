"""The dimensions that each of a contraction's three products sums over."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fractrain_fx.execution.arithmetic import Arithmetic, Convolution, Einsum, Linear

__all__ = ["Dims", "Summed", "kept_rows", "of_first", "of_output", "of_second", "positions"]

Dims = tuple[int, ...]


class Summed(NamedTuple):
    """What a product sums over, counted from the front of both operands, in the same order.

    Attributes:
        first, second: the dimensions of the first and of the second operand.
        one: in both, one of these dimensions along which an orthogonal transform leaves the product as it is; ``None``
            if the product sums over nothing.
    """

    first: Dims
    second: Dims
    one: tuple[int, int] | None


def of_output(arithmetic: Arithmetic, a: Tensor, b: Tensor) -> Summed:
    """The forward product of both factors."""
    if isinstance(arithmetic, Convolution):
        channels = 0 if arithmetic.transposed else 1
        return _summed((1,), _channels(b, channels))
    if isinstance(arithmetic, Einsum):
        first, second, out = _terms(arithmetic)
        return _shared(first, second, out)
    return _summed((a.ndim - 1,), (b.ndim - 1 if isinstance(arithmetic, Linear) else b.ndim - 2,))


def of_first(arithmetic: Arithmetic, g: Tensor, b: Tensor) -> Summed:
    """The gradient of the first factor: the output's gradient and the second factor."""
    if isinstance(arithmetic, Convolution):
        channels = 1 if arithmetic.transposed else 0
        return _summed((1,), _channels(b, channels))
    if isinstance(arithmetic, Einsum):
        first, second, out = _terms(arithmetic)
        return _shared(out, second, first)
    return _summed((g.ndim - 1,), (0 if isinstance(arithmetic, Linear) else b.ndim - 1,))


def of_second(arithmetic: Arithmetic, g: Tensor, a: Tensor, b: Tensor) -> Summed:
    """The gradient of the second factor: the output's gradient and the first factor."""
    if isinstance(arithmetic, Convolution):
        # Positions of input and output differ, and each output reads several inputs. Samples are summed one by one.
        dims = (0, *range(2, g.ndim))
        return Summed(dims, dims, (0, 0))
    if isinstance(arithmetic, Einsum):
        first, second, out = _terms(arithmetic)
        return _shared(out, first, second)
    if isinstance(arithmetic, Linear) and a.ndim == 1:
        return Summed((0,), (0,), None)
    if isinstance(arithmetic, Linear) or (b.ndim == 2 and a.ndim > 2):
        return _summed(tuple(range(g.ndim - 1)), tuple(range(a.ndim - 1)))
    return _summed((g.ndim - 2,), (a.ndim - 2,))


def kept_rows(arithmetic: Arithmetic, g: Tensor, a: Tensor, b: Tensor, of_first: bool) -> tuple[int, int] | None:
    """One dimension of ``g``, and of the gradient of a factor, in which each index of the one gives that of the other.

    Args:
        arithmetic: the contraction.
        g: the output's gradient.
        a: the first factor.
        b: the second factor.
        of_first: whether it is the gradient of the first factor.

    Returns:
        ``None`` if there is no such dimension: the factor is a vector, or was repeated for the product.
    """
    if isinstance(arithmetic, Convolution):
        return (0, 0) if of_first else None
    if isinstance(arithmetic, Einsum):
        first, second, out = _terms(arithmetic)
        term, other = (first, second) if of_first else (second, first)
        letter = next((letter for letter in reversed(out) if letter in term and letter not in other), None)
        return None if letter is None else (out.index(letter), term.index(letter))
    factor = a if of_first else b
    if factor.ndim < 2:
        return None
    # A first factor gives the output its rows, and a second one its columns.
    return (g.ndim - 2, a.ndim - 2) if of_first else (g.ndim - 1, b.ndim - 1)


def positions(arithmetic: Arithmetic, x: Tensor) -> Dims:
    """The dimensions of a convolution's operand that hold positions or the window; none in other products."""
    return tuple(range(2, x.ndim)) if isinstance(arithmetic, Convolution) else ()


def _summed(first: Dims, second: Dims) -> Summed:
    return Summed(first, second, (first[-1], second[-1]))


def _channels(b: Tensor, dim: int) -> Dims:
    """Input or output channels of a kernel; its window where a group has one of them."""
    return tuple(range(2, b.ndim)) if b.shape[1] == 1 else (dim,)


def _terms(arithmetic: Einsum) -> tuple[str, str, str]:
    factors, out = arithmetic.equation.split("->")
    first, second = factors.split(",")
    return first, second, out


def _shared(first: str, second: str, result: str) -> Summed:
    """The letters that two operands have and the result has not; the last of each operand if there are none."""
    letters = [letter for letter in first if letter in second and letter not in result]
    if not letters:
        return Summed((len(first) - 1,), (len(second) - 1,), None)
    return _summed(tuple(map(first.index, letters)), tuple(map(second.index, letters)))
