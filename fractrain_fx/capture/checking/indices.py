"""Indices out of range as an error of Python on every device.

A GPU finds them in a kernel, after which the process can use no GPU any more. A model that is tried at lengths that it
may not take has to refuse them before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CheckedIndices"]

# Indices with the number of entries that they choose from, and whether they may count from the end.
Lookup = tuple[Tensor, int, bool]


class CheckedIndices(TorchDispatchMode):
    """Raises ``IndexError`` before an op reads or writes an entry that is not there.

    On a GPU this waits for every index.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lookups = _LOOKUPS.get(func.overloadpacket)
        for index, size, backwards in lookups(*args) if lookups is not None else ():
            if index.numel() == 0 or index.device.type == "meta":
                continue
            low, high = (int(end) for end in torch.aminmax(index))
            if high >= size or low < (-size if backwards else 0):
                raise IndexError(f"{func.overloadpacket} asks for entries {low} to {high} of {size}")
        return func(*args, **(kwargs or {}))


def _table(table: Tensor, index: Tensor, *_: Any) -> Iterator[Lookup]:
    yield index, table.shape[0], False


def _along(x: Tensor, dim: int, index: Tensor, *_: Any) -> Iterator[Lookup]:
    yield index, x.shape[dim] if x.ndim else 1, False


def _flat(x: Tensor, index: Tensor, *_: Any) -> Iterator[Lookup]:
    yield index, x.numel(), True


def _each(x: Tensor, indices: Sequence[Tensor | None], *_: Any) -> Iterator[Lookup]:
    """The index tensors of ``x[i, :, j]``. A mask takes as many dimensions as it has, and is never out of range."""
    dim = 0
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            dim += index.ndim
            continue
        if index is not None:
            yield index, x.shape[dim], True
        dim += 1


_ATEN = torch.ops.aten
_LOOKUPS: dict[Any, Callable[..., Iterator[Lookup]]] = {
    **dict.fromkeys((_ATEN.embedding, _ATEN._embedding_bag, _ATEN._embedding_bag_forward_only), _table),
    **dict.fromkeys((_ATEN.index_select, _ATEN.gather), _along),
    **dict.fromkeys((_ATEN.scatter, _ATEN.scatter_, _ATEN.scatter_add, _ATEN.scatter_add_), _along),
    **dict.fromkeys((_ATEN.scatter_reduce, _ATEN.scatter_reduce_, _ATEN.index_fill, _ATEN.index_fill_), _along),
    **dict.fromkeys((_ATEN.index_add, _ATEN.index_add_, _ATEN.index_copy, _ATEN.index_copy_), _along),
    **dict.fromkeys((_ATEN.take, _ATEN.put, _ATEN.put_), _flat),
    **dict.fromkeys((_ATEN.index, _ATEN.index_put, _ATEN.index_put_, _ATEN._index_put_impl_), _each),
}
