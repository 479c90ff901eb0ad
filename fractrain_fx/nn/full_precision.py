"""State that stays in its own floating type when a model is cast."""

from __future__ import annotations

from typing import Any, Self

from torch import nn

__all__ = ["FullPrecision"]


class FullPrecision(nn.Module):
    """A module whose buffers follow the model to other devices, and keep their type.

    Half types would lose sums and slow averages: bfloat16 has three digits.
    """

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self
