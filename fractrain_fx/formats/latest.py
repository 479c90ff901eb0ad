"""What was last made of a tensor, for the next op that reads the same one (queries, keys and values)."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch import Tensor

from fractrain_fx.formats.bits import readable

__all__ = ["Latest"]


class Latest(threading.local):
    """One result with the tensor it was made of, for as long as that is there and was not written into.

    In eager mode on a CPU, and for each thread its own; elsewhere nothing is kept.
    """

    def __init__(self) -> None:
        self._made: tuple[weakref.ref[Tensor], int, Any, Any] | None = None

    def keep(self, x: Tensor, how: Any, result: Any) -> None:
        """Keep what was made of ``x``, and how, in place of anything kept before."""
        self._made = (weakref.ref(x), x._version, how, result) if _watched(x) else None

    def of(self, x: Tensor, how: Any) -> Any:
        """What was made of ``x`` in that way, or ``None``."""
        if self._made is None or not _watched(x):
            return None
        source, version, made_how, result = self._made
        return result if source() is x and version == x._version and made_how == how else None

    def drop(self) -> None:
        """Keep nothing any more."""
        self._made = None


def _watched(x: Tensor) -> bool:
    """Whether its version tells of writes: not in inference mode."""
    return readable(x) and not x.is_inference()
