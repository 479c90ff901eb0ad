"""Compare the results of two runs (structure, shapes, every bit), and an attribute with its earlier value."""

from __future__ import annotations

import copy
from array import array
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.immutable_collections import immutable_dict, immutable_list

from fractrain_fx.capture.model_errors import model_errors
from fractrain_fx.capture.trees import CONTAINERS, PLAIN, items_of

__all__ = ["copied", "difference", "equal", "overwritten", "same", "same_tensor", "without_defaults"]

# Containers of a graph that is interpreted; its generated code makes plain ones.
_MUTABLE: Mapping[type, type] = {immutable_dict: dict, immutable_list: list}


def same_tensor(a: Tensor | None, b: Tensor | None, tolerance: float = 0.0, floor: float = 0.0) -> bool:
    """Equal shape, dtype and values, NaN equal to NaN.

    ``tolerance`` is relative to the largest value, and if there is one, twice the rounding of a half type counts as
    none: sums in another order differ by that. So do differences up to ``floor``.
    """
    if a is None or b is None:
        return a is b
    if a.is_nested or b.is_nested:
        parts = [x.unbind() if x.is_nested else (x,) for x in (a, b)]
        pairs = zip(*parts, strict=False)
        if a.is_nested != b.is_nested or len(parts[0]) != len(parts[1]):
            return False
        return all(same_tensor(x, y, tolerance, floor) for x, y in pairs)
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if torch.equal(a, b):
        return True
    if not a.is_floating_point():
        return a.is_complex() and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    tolerance = max(tolerance, 2 * torch.finfo(a.dtype).eps) if tolerance else 0.0
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
    kinds = [_MUTABLE.get(type(value), type(value)) for value in (a, b)]
    if kinds[0] is not kinds[1] and not _same_fields(*kinds):
        return f"{where} is a {type(b).__name__} instead of a {type(a).__name__}"
    parts, others = items_of(a), items_of(b) or []
    if parts is None:
        return f"{where} is {b!r} instead of {a!r}" if a != b else None
    if [key for key, _ in parts] != [key for key, _ in others]:
        if isinstance(a, Mapping):
            return f"{where} has keys {list(b)} instead of {list(a)}"
        return f"{where} has {len(others)} parts instead of {len(parts)}"
    named = not isinstance(a, (Mapping, list, tuple))
    pairs = zip(parts, others, strict=True)
    differences = (
        difference(x, y, f"{where}.{key}" if named else f"{where}[{key!r}]", tolerance) for (key, x), (_, y) in pairs
    )
    return next((words for words in differences if words), None)


def _same_fields(a: type, b: type) -> bool:
    """Whether both are named tuples of one name: some models make the class again in each call."""
    fields = getattr(a, "_fields", ())
    return bool(fields) and a.__name__ == b.__name__ and fields == getattr(b, "_fields", ())


def copied(value: Any) -> Any:
    """``value`` with its containers and arrays copied, so that later changes inside are noticed.

    A list or dictionary of a class derived from them becomes a plain one.
    """
    if isinstance(value, (list, deque)) or type(value) is tuple:
        return _kind(value)(copied(part) for part in value)
    if isinstance(value, dict):
        return {key: copied(part) for key, part in value.items()}
    if type(value) in (np.ndarray, array, bytearray):
        return copy.copy(value)
    return set(value) if isinstance(value, set) else value


def same(before: Any, now: Any) -> bool:
    """Whether two values of an attribute mean the same. A tensor that was moved or cast does."""
    if before is now:
        return True
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        return _same_up_to_a_move(before, now)
    if _kind(before) is not _kind(now):
        return False
    if isinstance(before, np.ndarray):
        return (before.dtype, before.shape, before.tobytes()) == (now.dtype, now.shape, now.tobytes())
    if isinstance(before, list | tuple | deque):
        return len(before) == len(now) and all(map(same, before, now))
    if isinstance(before, dict):
        return list(before) == list(now) and all(same(before[key], now[key]) for key in before)
    return bool(before == now) if isinstance(before, set) else equal(before, now)


def without_defaults(now: Any, before: Any) -> Any:
    """A ``defaultdict`` without the entries that reading it has added since; another value as it is."""
    if not (isinstance(now, defaultdict) and isinstance(before, dict) and now.default_factory is not None):
        return now
    added = [key for key in now if key not in before]
    default = now.default_factory() if added else None
    return {key: part for key, part in now.items() if key in before or not equal(part, default)}


def overwritten(before: Any, now: Any) -> bool:
    """Whether a number or text in a value is another one now. A container that only grew may be a log."""
    if isinstance(before, PLAIN):
        return not same(before, now)
    if isinstance(before, (list, tuple)) and isinstance(now, (list, tuple)):
        return any(map(overwritten, before, now))
    if isinstance(before, dict) and isinstance(now, dict):
        return any(overwritten(part, now[key]) for key, part in before.items() if key in now)
    return False


def _kind(value: Any) -> type:
    """The plain container whose class a value's class is derived from, or else its own class."""
    return next((kind for kind in CONTAINERS if isinstance(value, kind)), type(value))


def equal(a: Any, b: Any) -> bool:
    """Whether two values are of one type and equal; NaN equals NaN."""
    try:
        return type(a) is type(b) and bool(a == b or (a != a and b != b))
    except model_errors():  # an object without a plain == counts as different
        return False


def _same_up_to_a_move(before: Tensor, now: Tensor) -> bool:
    if before.shape != now.shape or before.is_meta or now.is_meta:
        return before.shape == now.shape
    if before.dtype == now.dtype and before.device == now.device:
        return torch.equal(before, now)
    return torch.allclose(before.detach().cpu().double(), now.detach().cpu().double(), rtol=1e-2, equal_nan=True)
