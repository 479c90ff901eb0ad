"""What a number format is: how it rounds activations, weights and output gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fractrain_fx.formats.bits import of_options, work_dtype

__all__ = ["Bits", "CodedFormat", "Format", "SampleAxis"]

Bits = int | Int[Tensor, "*bits"]


class SampleAxis(Protocol):
    """Where the samples of a batch lie in a tensor (:class:`fractrain_fx.nn.batch_axis.BatchAxis` is one)."""

    def expand(self, per_sample: Float[Tensor, " batch"], shape: Sequence[int]) -> Tensor: ...

    def samples_first(self, x: Tensor, samples: int | None = None) -> Float[Tensor, "batch rest"]: ...


class Format(Protocol):
    """Pure functions from a tensor and its bits to the rounded tensor, of equal shape and type, outside autograd.

    ``bits`` is an int, a 0-dim tensor or a tensor that broadcasts against the values (bits of each sample): no result
    depends on a branch on what such a tensor holds, as a compiled graph has none. 0 and 32 bits leave the values as
    they are, bit for bit. A NaN or infinite value makes a NaN, finite ones never do. Results may be the input itself,
    or lie in ``out``, where memory of the input's shape in the type that is computed in was given.

    The derivative of each rounding is a function of its own, so that a fused op can apply it without having recorded
    the rounding. Gradients pass straight through unless a format says otherwise.

    Attributes:
        name: what a configuration calls it.
        straight: whether the gradient of an activation is that of the rounded one, whatever the values.
    """

    name: str
    straight: bool = True

    @abstractmethod
    def activation_range(self, x: Float[Tensor, "*dims"]) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """``lo`` and ``span`` of a batch, in float32 or wider: what evaluation averages."""
        ...

    @abstractmethod
    def activation(
        self,
        x: Float[Tensor, "*dims"],
        bits: Bits,
        *,
        lo: Float[Tensor, ""],
        span: Float[Tensor, ""],
        inside: bool = False,
        out: Tensor | None = None,
    ) -> Float[Tensor, "*dims"]:
        """Round ``x`` in the range that starts at ``lo`` and is ``span`` wide; ``inside``: this is its own range."""
        ...

    def activation_gradient(
        self, x: Float[Tensor, "*dims"], g: Float[Tensor, "*dims"], bits: Bits
    ) -> Float[Tensor, "*dims"]:
        """The gradient of ``x`` from ``g``, that of the rounded activation."""
        return g

    def activation_gains(
        self,
        x: Float[Tensor, "batch ..."],
        g: Float[Tensor, "batch ..."],
        bits: Sequence[int],
        *,
        lo: Float[Tensor, ""],
        span: Float[Tensor, ""],
        inside: bool = False,
    ) -> Float[Tensor, "batch options"]:
        """For each of several bits, the sum of ``g * (Q(x) - x)`` over each sample: 0 where they are 0 or 32."""
        dtype = work_dtype(x)
        x, g = x.flatten(1), g.flatten(1)

        def gains(widths: Sequence[int]) -> Tensor:
            errors = (self.activation(x, each, lo=lo, span=span).to(dtype) - x for each in widths)
            return torch.stack([(error * g).sum(1) for error in errors], dim=1)

        return of_options(bits, gains)

    @abstractmethod
    def weight_range(self, w: Float[Tensor, "*dims"], *, dim: int | None) -> tuple[Tensor, Tensor]:
        """What :meth:`weight` needs to know of ``w``, whose output channels lie along ``dim``: two small tensors.

        All of ``w`` belongs to one channel where ``dim`` is ``None``.
        """
        ...

    @abstractmethod
    def weight(
        self,
        w: Float[Tensor, "*dims"],
        bits: Bits,
        *,
        dim: int | None,
        ends: tuple[Tensor, Tensor] | None = None,
        out: Tensor | None = None,
    ) -> Float[Tensor, "*dims"]:
        """Round ``w``; ``ends`` is its :meth:`weight_range` where that is known already."""
        ...

    def weight_gradient(
        self, w: Float[Tensor, "*dims"], g: Float[Tensor, "*dims"], bits: Bits
    ) -> Float[Tensor, "*dims"]:
        """The gradient of ``w`` from ``g``, that of the rounded weight."""
        return g

    @abstractmethod
    def gradient(
        self,
        g: Float[Tensor, "*dims"],
        bits: Bits,
        *,
        axis: SampleAxis,
        seed: Int[Tensor, ""] | None = None,
        out: Tensor | None = None,
    ) -> Float[Tensor, "*dims"]:
        """Round an output gradient, whose samples lie along ``axis``, stochastically.

        ``seed`` fixes the noise; without it, it is drawn from torch's default generator.
        """
        ...


@runtime_checkable
class CodedFormat(Format, Protocol):
    """A format whose activations at up to 8 bits fit one byte each."""

    @abstractmethod
    def activation_codes(
        self,
        x: Float[Tensor, "*dims"],
        bits: Int[Tensor, ""],
        *,
        lo: Float[Tensor, ""],
        span: Float[Tensor, ""],
        inside: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Int[Tensor, "*dims"], Float[Tensor, "*dims"]]:
        """Level numbers (uint8) and what :meth:`activation` gives, at one width of 1 to 8 bits."""
        ...

    @abstractmethod
    def activation_values(
        self,
        codes: Int[Tensor, "*dims"],
        bits: Int[Tensor, ""],
        *,
        lo: Float[Tensor, ""],
        span: Float[Tensor, ""],
        inside: bool = False,
        out: Tensor | None = None,
    ) -> Float[Tensor, "*dims"]:
        """The rounded activation from its level numbers, bit for bit, in float32 or wider."""
        ...
