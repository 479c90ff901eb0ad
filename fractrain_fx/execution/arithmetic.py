"""How each family of contractions is computed and differentiated, as its fused op needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from fractrain_fx.formats.scratch import Order

__all__ = [
    "AddMatMul",
    "Arithmetic",
    "Bound",
    "Convolution",
    "Einsum",
    "GroupedMatMul",
    "Linear",
    "MatMul",
    "summed_to",
]

Needs = tuple[bool, bool, bool]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Bound(NamedTuple):
    """The arguments of a call: both factors, the term added to their product, and the rest, which are not tensors.

    For a call in a graph, nodes stand in place of the tensors. A grouped product adds nothing: the ends of its groups
    stand in place of the added term.
    """

    a: Any
    b: Any
    added: Any
    static: tuple[Any, ...] = ()


class Arithmetic(Protocol):
    """One family of contractions.

    Attributes:
        order: the order in memory in which it reads its factors quickest: ``matrices`` if it multiplies those of the
            last two dimensions.
    """

    order: ClassVar[Order]

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bound:
        """Sort the arguments of a call of the original function, whether positional or by keyword."""
        ...

    def forward(self, call: Bound) -> Tensor:
        """The contraction itself."""
        ...

    def backward(self, g: Tensor, call: Bound, needs: Needs) -> Gradients:
        """Gradients of both factors and of the added term, if ``needs`` asks for them, by torch's own formulas."""
        ...


@dataclass(frozen=True)
class Convolution:
    """``conv1d`` to ``conv3d``, plain and transposed, grouped or not.

    Attributes:
        kernel: its spatial sizes, odd if the padding is ``same``: for even sizes its two sides would differ.
        transposed: whether it is a transposed convolution.
    """

    order: ClassVar[Order] = "kept"
    kernel: tuple[int, ...]
    transposed: bool = False

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bound:
        last = ("output_padding", "groups", "dilation") if self.transposed else ("dilation", "groups")
        names = ("input", "weight", "bias", "stride", "padding", *last)
        arguments = dict(zip(names, args, strict=False)) | dict(kwargs)
        stride, dilation = (self._sizes(arguments.get(name, 1)) for name in ("stride", "dilation"))
        padding = arguments.get("padding", 0)
        if padding == "valid":
            padding = 0
        elif padding == "same":
            padding = [d * (k - 1) // 2 for d, k in zip(dilation, self.kernel, strict=True)]
        output_padding = self._sizes(arguments.get("output_padding", 0))
        static = (stride, self._sizes(padding), dilation, output_padding, arguments.get("groups", 1))
        return Bound(arguments["input"], arguments["weight"], arguments.get("bias"), static)

    def _sizes(self, value: Any) -> tuple[int, ...]:
        sizes = tuple(value) if isinstance(value, Sequence) else (value,)
        return sizes * len(self.kernel) if len(sizes) == 1 else sizes

    def forward(self, call: Bound) -> Tensor:
        stride, padding, dilation, output_padding, groups = call.static
        return torch.convolution(
            call.a, call.b, call.added, stride, padding, dilation, self.transposed, output_padding, groups
        )

    def backward(self, g: Tensor, call: Bound, needs: Needs) -> Gradients:
        stride, padding, dilation, output_padding, groups = call.static
        channels = call.b.shape[1] * groups if self.transposed else call.b.shape[0]
        gradients: Gradients = torch.ops.aten.convolution_backward(
            g, call.a, call.b, [channels], stride, padding, dilation, self.transposed, output_padding, groups, needs
        )
        return _asked(gradients, needs)


@dataclass(frozen=True)
class Linear:
    """``a @ b.T + added``."""

    order: ClassVar[Order] = "matrices"

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bound:
        arguments = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs)
        return Bound(arguments["input"], arguments["weight"], arguments.get("bias"))

    def forward(self, call: Bound) -> Tensor:
        return F.linear(call.a, call.b, call.added)

    def backward(self, g: Tensor, call: Bound, needs: Needs) -> Gradients:
        rows = g.reshape(-1, g.shape[-1])
        a = rows.mm(call.b).view(call.a.shape) if needs[0] else None
        b = rows.t().mm(call.a.reshape(-1, call.a.shape[-1])) if needs[1] else None
        return a, b, rows.sum(0) if needs[2] else None


@dataclass(frozen=True)
class MatMul:
    """``matmul``, ``mm`` and ``bmm`` of matrices or batches of them.

    Attributes:
        names: keywords of the two factors.
        swapped: whether the second argument is the first factor (``__rmatmul__``).
    """

    order: ClassVar[Order] = "matrices"
    names: tuple[str, str] = ("input", "other")
    swapped: bool = False

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bound:
        arguments = dict(zip(self.names, args, strict=False)) | dict(kwargs)
        first, second = (arguments[name] for name in self.names)
        return Bound(second, first, None) if self.swapped else Bound(first, second, None)

    def forward(self, call: Bound) -> Tensor:
        return torch.matmul(call.a, call.b)

    def backward(self, g: Tensor, call: Bound, needs: Needs) -> Gradients:
        return (*_matmul_gradients(g, call.a, call.b, needs), None)


@dataclass(frozen=True)
class AddMatMul:
    """``addmm`` and ``baddbmm``: ``beta * added + alpha * a @ b``.

    Attributes:
        names: keywords of the added term and of the two factors.
    """

    order: ClassVar[Order] = "matrices"
    names: tuple[str, str, str]

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bound:
        arguments = dict(zip(self.names, args, strict=False)) | dict(kwargs)
        added, a, b = (arguments[name] for name in self.names)
        return Bound(a, b, added, (arguments.get("beta", 1), arguments.get("alpha", 1)))

    def forward(self, call: Bound) -> Tensor:
        beta, alpha = call.static
        function = torch.addmm if call.a.ndim == 2 else torch.baddbmm
        return function(call.added, call.a, call.b, beta=beta, alpha=alpha)

    def backward(self, g: Tensor, call: Bound, needs: Needs) -> Gradients:
        beta, alpha = call.static
        scaled = g if alpha == 1 else g * alpha
        added = None
        if needs[2] and call.added is not None:
            added = summed_to(g, call.added.shape)
            added = added if beta == 1 else added * beta
        return (*_matmul_gradients(scaled, call.a, call.b, needs), added)


@dataclass(frozen=True)
class Einsum:
    """``einsum`` of two factors in which each index of a factor is in the other one or in the result.

    Attributes:
        equation: the equation, with an explicit result.
    """

    order: ClassVar[Order] = "kept"
    equation: str

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bound:
        return Bound(args[1], args[2], None)

    def forward(self, call: Bound) -> Tensor:
        return torch.einsum(self.equation, call.a, call.b)

    def backward(self, g: Tensor, call: Bound, needs: Needs) -> Gradients:
        factors, out = self.equation.split("->")
        first, second = factors.split(",")
        a = torch.einsum(f"{out},{second}->{first}", g, call.b) if needs[0] else None
        b = torch.einsum(f"{out},{first}->{second}", g, call.a) if needs[1] else None
        return a, b, None


@dataclass(frozen=True)
class GroupedMatMul:
    """``grouped_mm``: each group of rows of ``a`` times its own matrix of ``b``, as the experts of a mixture compute.

    ``added`` holds the end of each group: group ``i`` has the rows from ``added[i - 1]`` up to ``added[i]``.
    """

    order: ClassVar[Order] = "matrices"

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bound:
        arguments = dict(zip(("mat_a", "mat_b", "offs"), args, strict=False)) | dict(kwargs)
        return Bound(arguments["mat_a"], arguments["mat_b"], arguments["offs"])

    def forward(self, call: Bound) -> Tensor:
        return F.grouped_mm(call.a, call.b, offs=call.added)

    def backward(self, g: Tensor, call: Bound, needs: Needs) -> Gradients:
        a = F.grouped_mm(g, call.b.mT, offs=call.added) if needs[0] else None
        if not needs[1]:
            return a, None, None
        # In the memory order of `b`, so that later ops need not transpose it.
        if call.b.stride(-1) > call.b.stride(-2):
            return a, F.grouped_mm(g.mT, call.a, offs=call.added).mT, None
        return a, F.grouped_mm(call.a.mT, g, offs=call.added), None


def summed_to(g: Tensor, shape: Sequence[int]) -> Tensor:
    """The gradient of a term that was broadcast to ``g``, in fresh memory, because that of ``g`` is reused."""
    return g.clone() if g.shape == shape else g.sum_to_size(shape)


def _matmul_gradients(g: Tensor, a: Tensor, b: Tensor, needs: Needs) -> tuple[Tensor | None, Tensor | None]:
    of_a = of_b = None
    if needs[0]:
        of_a = torch.matmul(g, b.mT)
        of_a = of_a if of_a.shape == a.shape else of_a.sum_to_size(a.shape)
    if needs[1]:
        if b.ndim == 2 and a.ndim > 2:
            # One product over all rows instead of a batch of products and their sum.
            of_b = a.reshape(-1, a.shape[-1]).t().mm(g.reshape(-1, g.shape[-1]))
        else:
            # In the memory order of `b`, so that later ops need not transpose it.
            turned = b.ndim > 1 and b.stride(-1) > b.stride(-2)
            of_b = torch.matmul(g.mT, a).mT if turned else torch.matmul(a.mT, g)
            of_b = of_b if of_b.shape == b.shape else of_b.sum_to_size(b.shape)
    return of_a, of_b


def _asked(gradients: Gradients, needs: Needs) -> Gradients:
    a, b, added = (gradient if need else None for gradient, need in zip(gradients, needs, strict=True))
    return a, b, added
