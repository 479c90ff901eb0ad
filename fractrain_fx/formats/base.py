"""What a number format is: how it rounds activations, weights and output gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["Format", "SampleAxis"]


class SampleAxis(Protocol):
    """Where the samples of a batch lie in a tensor (:class:`fractrain_fx.nn.axis.BatchAxis` is one)."""

    def expand(self, per_sample: Float[Tensor, " batch"], ndim: int) -> Tensor: ...

    def samples_first(self, x: Tensor) -> Float[Tensor, "batch rest"]: ...


class Format(Protocol):
    """Pure functions from a tensor and its bits to the rounded tensor, of equal shape and type.

    ``bits`` is an int, a 0-dim tensor or a tensor that broadcasts against the values (bits of each sample): no result
    depends on a branch on what such a tensor holds, as a compiled graph has none. 0 and 32 bits leave the values as
    they are, bit for bit. Each method has its own gradient. A NaN or infinite value makes a NaN, finite ones never do.
    """

    name: str

    def activation_range(self, x: Float[Tensor, "*dims"]) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """``lo`` and ``span`` of a batch, in float32 or wider and outside autograd: what evaluation averages."""
        ...

    def activation(
        self,
        x: Float[Tensor, "*dims"],
        bits: int | Int[Tensor, "*bits"],
        *,
        lo: Float[Tensor, ""],
        span: Float[Tensor, ""],
    ) -> Float[Tensor, "*dims"]:
        """Round ``x`` inside the range that starts at ``lo`` and is ``span`` wide."""
        ...

    def activation_errors(
        self, x: Float[Tensor, "*dims"], bits: Sequence[int], *, lo: Float[Tensor, ""], span: Float[Tensor, ""]
    ) -> Iterator[Float[Tensor, "*dims"]]:
        """For each of several bits (none of them 0 or 32), what rounding changes: ``Q(x) - x``, in float32 or wider."""
        ...

    def weight(
        self, w: Float[Tensor, "*dims"], bits: int | Int[Tensor, "*bits"], *, dim: int
    ) -> Float[Tensor, "*dims"]:
        """Round ``w``, whose output channels lie along ``dim``."""
        ...

    def gradient(
        self, g: Float[Tensor, "*dims"], bits: int | Int[Tensor, "*bits"], *, axis: SampleAxis
    ) -> Float[Tensor, "*dims"]:
        """Round an output gradient, whose samples lie along ``axis``. Called in backward, outside autograd."""
        ...
