"""The kind of numbers that a tensor holds, on which the code of a model may branch."""

from __future__ import annotations

import torch

__all__ = ["Kind", "kind_of"]


class Kind:
    """Stands for a tensor in the form of an argument."""

    def __init__(self, words: str) -> None:
        self._words = words

    def __repr__(self) -> str:
        return self._words


_FLOATS = Kind("a tensor")
_COMPLEX = Kind("a tensor of complex numbers")
_INTEGERS = Kind("a tensor of integers")
_BOOLEANS = Kind("a tensor of booleans")


def kind_of(dtype: torch.dtype) -> Kind:
    """The kind of a type. A mask of booleans and one of floats mean different things, float16 and float32 do not."""
    if dtype.is_floating_point:
        return _FLOATS
    if dtype.is_complex:
        return _COMPLEX
    return _BOOLEANS if dtype == torch.bool else _INTEGERS
