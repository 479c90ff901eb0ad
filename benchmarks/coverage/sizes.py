"""The same inputs at other sizes: fewer and more samples, shorter and longer sequences, smaller and larger images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fractrain_fx.capture import resize_batch
from fractrain_fx.capture.inputs.batch import batch_size

__all__ = ["Kind", "Variant", "variants"]

Kind = Literal["batch", "length", "image"]

_SIDE, _SMALL_SIDE, _LENGTHS = 32, 8, 3


@dataclass(frozen=True)
class Variant:
    """A call at another size.

    Attributes:
        kind: the kind of size that it changes.
        label: the old and the new size.
        args, kwargs: the call.
    """

    kind: Kind
    label: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def variants(args: tuple[Any, ...], kwargs: Mapping[str, Any], *, packed: bool = False) -> Iterator[Variant]:
    """Calls at other sizes. A model takes most of them, and refuses some.

    Args:
        args: positional inputs.
        kwargs: keyword inputs.
        packed: whether tensors may have several rows for each sample, such as pieces of images.
    """
    inputs = (args, dict(kwargs))
    samples = batch_size(inputs, packed=packed)
    if samples:
        for other in dict.fromkeys((1, samples + 1, 2 * samples + 1)):
            if other != samples:
                yield Variant("batch", f"batch {samples} to {other}", *resize_batch(inputs, other, packed=packed))
    sides = _image_sides(inputs)
    if sides:
        small = tuple(side - _SIDE if side > _SIDE else side // 2 for side in sides)
        for other_sides in (tuple(side + _SIDE for side in sides), small):
            label = f"image {_words(sides)} to {_words(other_sides)}"
            yield Variant("image", label, *_map(inputs, _image_resizer(sides, other_sides)))
    for length in _lengths(inputs, sides):
        for other in dict.fromkeys((length - 1, length // 2, length + 1, 2 * length)):
            if other:
                label = f"length {length} to {other}"
                yield Variant("length", label, *_map(inputs, _length_resizer(length, other, samples)))


def _map(inputs: tuple[tuple[Any, ...], dict[str, Any]], change: Callable[[Tensor], Tensor]) -> Any:
    return pytree.tree_map_only(Tensor, change, inputs)


def _words(sides: tuple[int, ...]) -> str:
    return " x ".join(map(str, sides))


def _tensors(inputs: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)]


def _image_sides(inputs: Any) -> tuple[int, ...]:
    """Height and width of the images among the inputs (with depth for volumes); empty if there are none."""
    for x in _tensors(inputs):
        if not x.is_floating_point() or x.ndim < 4:
            continue
        shape = tuple(x.shape)
        if x.ndim == 5 and shape[2] == shape[3] == shape[4] >= _SMALL_SIDE:
            return shape[2:]
        last = shape[1:3] if x.ndim == 4 and shape[3] < min(shape[1:3]) else shape[-2:]
        if min(last) >= _SMALL_SIDE:
            return last
    return ()


def _image_resizer(sides: tuple[int, ...], others: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """Cuts or repeats images and other tensors with their sides, such as masks and label maps."""

    def resize(x: Tensor) -> Tensor:
        first = next((i for i in range(1, x.ndim) if tuple(x.shape[i : i + len(sides)]) == sides), None)
        if first is None:
            return x
        for i, other in enumerate(others):
            x = _resized(x, first + i, other)
        return x

    return resize


def _lengths(inputs: Any, sides: tuple[int, ...]) -> list[int]:
    """Sizes along the second dimension, and along the third for series; the most frequent come first.

    Some are widths of features, and the model refuses other values for them.
    """
    counts: Counter[int] = Counter()
    for x in _tensors(inputs):
        if x.ndim in (2, 3) and not (sides and tuple(x.shape[-len(sides) :]) == sides):
            counts[x.shape[1]] += 1
            if x.ndim == 3 and x.is_floating_point():
                counts[x.shape[2]] += 0
    return [length for length, _ in counts.most_common() if length > 1][:_LENGTHS]


def _length_resizer(length: int, other: int, samples: int | None) -> Callable[[Tensor], Tensor]:
    """Cuts or continues sequences, masks of pairs, and tables of positions that all samples share."""

    def resize(x: Tensor) -> Tensor:
        dims = [i for i in range(1, min(x.ndim, 3)) if x.shape[i] == length][:1]
        if x.ndim >= 3 and x.shape[-1] == x.shape[-2] == length and (x.ndim > 3 or not x.is_floating_point()):
            dims = [x.ndim - 2, x.ndim - 1]
        if x.ndim and x.shape[0] == length != samples:
            dims = [0]
        for dim in dims:
            x = _resized(x, dim, other)
        return x

    return resize


def _resized(x: Tensor, dim: int, size: int) -> Tensor:
    """Cut at the end, or continued with the same values in reverse order, so that padding stays at the end."""
    old = x.shape[dim]
    index = torch.arange(size, device=x.device)
    index = torch.where(index < old, index, old - 1 - (index - old) % old)
    return x.detach().index_select(dim, index).requires_grad_(x.requires_grad)
