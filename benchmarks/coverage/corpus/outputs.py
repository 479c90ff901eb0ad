"""The values that a call returns, in a list: to compare two calls, and to make a loss of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.coverage.corpus.modules import is_stand_in

__all__ = ["differs", "leaves", "objective", "same"]

_DEPTH = 6


def leaves(value: Any, place: str = "output", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Every value in containers and in attributes of objects, each with its place."""
    if isinstance(value, Tensor | int | float | complex | str | bytes | type | None) or is_stand_in(value):
        yield place, value
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from leaves(part, f"{place}[{index}]", depth + 1)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from leaves(part, f"{place}[{key!r}]", depth + 1)
    elif depth < _DEPTH:
        for name, part in getattr(value, "__dict__", {}).items():
            yield from leaves(part, f"{place}.{name}", depth + 1)


def differs(a: Any, b: Any) -> str | None:
    """The first difference of two outputs, or ``None`` if they are equal bit for bit. NaN equals NaN."""
    mine, theirs = list(leaves(a)), list(leaves(b))
    if [place for place, _ in mine] != [place for place, _ in theirs]:
        return f"{len(theirs)} values instead of {len(mine)}"
    if type(a) is not type(b) and not hasattr(a, "_fields"):
        return f"a {type(b).__name__} instead of a {type(a).__name__}"
    return next((place for (place, x), (_, y) in zip(mine, theirs, strict=True) if not same(x, y)), None)


def same(x: Any, y: Any) -> bool:
    """Whether two values are of one type and equal, bit for bit if they are tensors."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return type(x) is type(y) and bool(x == y or (x != x and y != y))
    if x.shape != y.shape or x.dtype != y.dtype or x.layout != y.layout:
        return False
    x, y = (tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach() for tensor in (x, y))
    if x.is_floating_point() or x.is_complex():
        missing = x.isnan()
        return bool(torch.equal(missing, y.isnan()) and torch.equal(x[~missing], y[~missing]))
    return torch.equal(x, y)


def objective(output: Any) -> Tensor | None:
    """A weighted sum of all values with a gradient; ``None`` if there are none.

    The weights differ, because an even sum of a softmax has no gradient. Values that are not finite are left out.
    """
    terms = []
    for _, leaf in leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.numel():
            leaf = leaf.to_dense() if leaf.layout is not torch.strided else leaf
            leaf = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
            flat = leaf.float().nan_to_num(0.0, 0.0, 0.0).reshape(-1)
            terms.append((flat * torch.arange(flat.numel(), device=flat.device).cos()).sum())
    return torch.stack(terms).sum() if terms else None
