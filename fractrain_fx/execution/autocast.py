"""Autocast as it was in forward, also in a backward pass under another."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["autocast", "autocast_dtype", "autocasting"]


def _has_autocast(device: str) -> bool:
    """Whether a type of device has autocast; the compiler of torch 2.11 runs this and cannot compile it."""
    return torch.amp.is_autocast_available(device)


# The same as `torch.compiler.assume_constant_result`, which would import the compiler here.
_has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]


def autocast_dtype(device: str) -> torch.dtype | None:
    """The type that autocast sets on a type of device; ``None`` if it is off, or if the device has none (meta)."""
    on = _has_autocast(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


def autocasting(device: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast as it was when :func:`autocast_dtype` gave ``dtype``."""
    if not _has_autocast(device):
        return nullcontext()
    return torch.autocast(device, dtype, enabled=dtype is not None)


def autocast(x: Any, dtype: torch.dtype) -> Any:
    """Cast an argument of a product as autocast does."""
    casts = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(dtype) if casts else x
