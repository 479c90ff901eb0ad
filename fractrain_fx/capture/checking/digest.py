"""Exact, short stand-ins for tensors, so that two runs can be compared although neither is kept."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Digest", "digest"]

# Bytes that are hashed at once, which is what a digest needs beside the tensor.
_CHUNK = 2**22

_COMPARED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Digest:
    """A tensor's shape, its type and a SHA-256 of its values.

    Digests are equal if and only if the tensors are, value for value: NaN equals NaN, and 0 equals -0.

    Attributes:
        shape: of the tensor.
        dtype: of the tensor.
        content: the hash.
        largest: the largest finite magnitude of a floating tensor, else 0.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    content: bytes
    largest: float

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def digest(x: Tensor) -> Digest:
    """Read a tensor once, in chunks."""
    hashed, largest = hashlib.sha256(), 0.0
    for part in _chunks(x.detach()):
        if part.dtype in _COMPARED and part.numel():
            part = part + 0.0  # turns -0 into 0
            top = float(part.abs().amax())
            if not math.isfinite(top):
                part = part.masked_fill_(part.isnan(), torch.nan)  # NaN has many bit patterns
                top = float(part.abs().nan_to_num(0.0, 0.0).amax())
            largest = max(largest, top)
        hashed.update(part.contiguous().view(torch.uint8).cpu().numpy().data)
    return Digest(tuple(x.shape), x.dtype, hashed.digest(), largest)


def _chunks(x: Tensor) -> Iterator[Tensor]:
    if x.is_nested:
        for each in x.unbind():
            yield from _chunks(each)
        return
    if x.layout is not torch.strided:
        x = (x if x.layout is torch.sparse_coo else x.to_sparse_coo()).coalesce()
        yield from _chunks(x.indices())
        yield from _chunks(x.values())
        return
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.reshape(1) if x.ndim == 0 else x
    rows = max(1, _CHUNK // max(1, x[:1].numel() * x.element_size()))
    for start in range(0, len(x), rows):
        yield x[start : start + rows].reshape(-1)
