"""How many samples example inputs hold, and the same inputs with more or fewer of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["batch_size", "resize_batch"]


def batch_size(inputs: Any, axis: int = 0, *, packed: bool = False) -> int | None:
    """Samples in ``inputs``: the size that most tensors have along ``axis`` (the first tensor's, where sizes tie).

    Args:
        inputs: tensors in any nesting of containers.
        axis: the dimension of every input that holds the samples.
        packed: take the smallest size, as tensors may have several rows for each sample.

    Returns:
        The number of samples, or ``None`` where no tensor has that dimension.
    """
    sizes = [x.shape[axis] for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor) and x.ndim > axis]
    if packed:
        return min(sizes, default=None)
    return Counter(sizes).most_common(1)[0][0] if sizes else None


def resize_batch(inputs: Any, size: int, axis: int = 0, *, packed: bool = False) -> Any:
    """The same inputs with ``size`` samples: the first ones, repeated in turn where there are too few.

    Tensors whose dimension ``axis`` is not the batch (one table for all samples, say) stay as they are. With ``packed``
    those that have several rows for each sample, one sample after the other, grow as well (cut-up images).
    """
    batch = batch_size(inputs, axis, packed=packed)

    def resize(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.ndim <= axis or not batch:
            return x
        rows, rest = divmod(x.shape[axis], batch)
        if rest or not rows or (rows > 1 and not packed):
            return x
        index = torch.arange(size * rows, device=x.device) % (batch * rows)
        return x.detach().index_select(axis, index).requires_grad_(x.requires_grad)

    return pytree.tree_map(resize, inputs) if batch else inputs
