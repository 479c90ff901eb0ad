"""Regions of a graph that a pair of calls begins and ends: autocast, and gradients switched on or off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["AUTOCAST", "REGIONS", "enter_gradients", "leave_gradients"]

AUTOCAST = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)


def enter_gradients(mode: bool) -> bool:
    """Switch gradients on or off; returns whether they were on."""
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(mode)
    return before


def leave_gradients(before: bool) -> None:
    """Put the gradient mode back."""
    torch._C._set_grad_enabled(before)


REGIONS: dict[Any, Callable[..., Any]] = {AUTOCAST[0]: AUTOCAST[1], enter_gradients: leave_gradients}
"""The call that begins a region, and the call that ends it."""
