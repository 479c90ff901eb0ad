"""The part of a batch axis that number formats read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jaxtyping import Float
from torch import Tensor

__all__ = ["SampleAxis"]


class SampleAxis(Protocol):
    """The dimension of a tensor that holds its samples (:class:`fractrain_fx.nn.batch_axis.BatchAxis` is one)."""

    @property
    def axis(self) -> int: ...

    @property
    def factor(self) -> int: ...

    @property
    def whole(self) -> bool: ...

    @property
    def folded(self) -> bool: ...

    def expand(self, per_sample: Float[Tensor, " batch"], shape: Sequence[int]) -> Tensor: ...

    def samples_first(self, x: Tensor, samples: int | None = None) -> Float[Tensor, "batch rest"]: ...
