"""Compare an attribute with its earlier value: numbers, containers, moved tensors, and other objects."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["copied", "same"]


def copied(value: Any) -> Any:
    """``value`` with its containers and arrays copied, so that later changes inside are noticed."""
    if type(value) in (list, deque):
        return type(value)(copied(part) for part in value)
    if type(value) is dict:
        return {key: copied(part) for key, part in value.items()}
    if type(value) is np.ndarray:
        return value.copy()
    return set(value) if type(value) is set else value


def same(before: Any, now: Any) -> bool:
    """Whether two values of an attribute mean the same. A tensor that was moved or cast does."""
    if before is now:
        return True
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        return _same_tensors(before, now)
    if type(before) is not type(now):
        return False
    if isinstance(before, np.ndarray):
        return (before.dtype, before.shape, before.tobytes()) == (now.dtype, now.shape, now.tobytes())
    if isinstance(before, list | tuple | deque):
        return len(before) == len(now) and all(map(same, before, now))
    if isinstance(before, dict):
        return list(before) == list(now) and all(same(before[key], now[key]) for key in before)
    try:
        return bool(before == now)
    except Exception:  # an object without a plain == counts as different
        return False


def _same_tensors(before: Tensor, now: Tensor) -> bool:
    if before.shape != now.shape or before.is_meta or now.is_meta:
        return before.shape == now.shape
    if before.dtype == now.dtype and before.device == now.device:
        return torch.equal(before, now)
    return torch.allclose(before.detach().cpu().double(), now.detach().cpu().double(), rtol=1e-2, equal_nan=True)
