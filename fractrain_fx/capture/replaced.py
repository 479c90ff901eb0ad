"""Put other values in places of Python while a model runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

__all__ = ["Replacement", "replaced"]

Replacement = tuple[Any, str, Any]
"""An object or class, the name of an attribute, and another value for it."""

_INHERITED = object()


@contextlib.contextmanager
def replaced(*places: Replacement) -> Iterator[None]:
    """Give attributes other values inside. One that was inherited is inherited again afterwards."""
    before: list[Replacement] = []
    try:
        for owner, name, value in places:
            before.append((owner, name, vars(owner).get(name, _INHERITED)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            delattr(owner, name) if value is _INHERITED else setattr(owner, name, value)
