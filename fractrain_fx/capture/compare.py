"""Compare the results of two runs: structure, shapes, and every bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx.immutable_collections import immutable_dict, immutable_list

from fractrain_fx.capture.trees import fields_of

__all__ = ["difference", "same_tensor"]

# Containers of a graph that is interpreted; its generated code makes plain ones.
_MUTABLE: Mapping[type, type] = {immutable_dict: dict, immutable_list: list}


def same_tensor(a: Tensor | None, b: Tensor | None, tolerance: float = 0.0, floor: float = 0.0) -> bool:
    """Equal shape, dtype and values, NaN equal to NaN.

    ``tolerance`` is relative to the largest value; differences up to ``floor`` count as none.
    """
    if a is None or b is None:
        return a is b
    if a.is_nested or b.is_nested:
        parts = [x.unbind() if x.is_nested else (x,) for x in (a, b)]
        same = (same_tensor(x, y, tolerance, floor) for x, y in zip(*parts, strict=False))
        return a.is_nested == b.is_nested and len(parts[0]) == len(parts[1]) and all(same)
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if torch.equal(a, b):
        return True
    if not a.is_floating_point():
        return a.is_complex() and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    scale = float(a.detach()[a.isfinite()].abs().max()) if a.isfinite().any() else 0.0
    return torch.allclose(a, b, rtol=0, atol=max(tolerance * scale, floor), equal_nan=True)


def difference(a: Any, b: Any, where: str = "output", tolerance: float = 0.0) -> str | None:
    """The first difference between two results of a call, in words, or ``None``."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if same_tensor(a, b, tolerance):
            return None
        if a.is_nested or b.is_nested or a.layout != b.layout:
            return f"{where} has other parts or another layout"
        if a.shape != b.shape:
            return f"{where} has shape {tuple(b.shape)} instead of {tuple(a.shape)}"
        if a.dtype != b.dtype:
            return f"{where} is {b.dtype} instead of {a.dtype}"
        return f"{where} differs by {float((a.detach().double() - b.detach().double()).abs().max()):.3g}"
    kinds = [_MUTABLE.get(type(each), type(each)) for each in (a, b)]
    if kinds[0] is not kinds[1] and not _same_fields(*kinds):
        return f"{where} is a {type(b).__name__} instead of a {type(a).__name__}"
    if isinstance(a, Mapping):
        if list(a) != list(b):
            return f"{where} has keys {list(b)} instead of {list(a)}"
        pairs = [(a[key], b[key], f"{where}[{key!r}]") for key in a]
    elif isinstance(a, (tuple, list)):
        if len(a) != len(b):
            return f"{where} has {len(b)} parts instead of {len(a)}"
        pairs = [(x, y, f"{where}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        theirs = dict(fields_of(b))
        pairs = [(x, theirs[name], f"{where}.{name}") for name, x in fields_of(a)]
        if not pairs and a != b:
            return f"{where} is {b!r} instead of {a!r}"
    found = (difference(*pair, tolerance) for pair in pairs)
    return next((words for words in found if words), None)


def _same_fields(a: type, b: type) -> bool:
    """Whether both are named tuples of one name: some models make the class again in each call."""
    fields = getattr(a, "_fields", ())
    return bool(fields) and a.__name__ == b.__name__ and fields == getattr(b, "_fields", ())
