"""A batch as the arguments of a call; the samples in example inputs, and the same inputs with more or fewer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fractrain_fx.capture.trees import is_strided, map_copies, tensors_in

__all__ = ["batch_size", "call_of", "resize_batch"]


def batch_size(inputs: Any, axis: int = 0, *, packed: bool = False) -> int | None:
    """Samples in nested ``inputs``: the size that most tensors have along ``axis`` (the first one, if sizes tie).

    ``packed`` takes the smallest size, because tensors may have several rows for each sample. ``None`` if no tensor has
    that dimension.
    """
    sizes = [x.shape[axis] for x in tensors_in(inputs) if x.ndim > axis and is_strided(x)]
    if packed:
        return min(sizes, default=None)
    return Counter(sizes).most_common(1)[0][0] if sizes else None


def resize_batch(inputs: Any, size: int, axis: int = 0, *, packed: bool = False) -> Any:
    """The same inputs with ``size`` samples: the first ones, repeated in turn if there are too few.

    Tensors whose dimension ``axis`` is not the batch (such as one table for all samples) stay as they are. ``packed``
    also grows tensors with several rows for each sample, one sample after the other (such as images in pieces).
    """
    batch = batch_size(inputs, axis, packed=packed)

    def resize(x: Tensor) -> Tensor:
        if x.ndim <= axis or not batch or not is_strided(x):
            return x
        rows, rest = divmod(x.shape[axis], batch)
        if rest or not rows or (rows > 1 and not packed):
            return x
        index = torch.arange(size * rows, device=x.device) % (batch * rows)
        return x.detach().index_select(axis, index).requires_grad_(x.requires_grad)

    return map_copies(inputs, resize) if batch else inputs


def call_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call on a batch: a tensor, a tuple whose first element is the input, or keyword arguments."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return (batch[0],), {}
    return (batch,), {}
