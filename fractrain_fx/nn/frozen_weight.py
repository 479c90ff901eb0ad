"""A weight that is not trained, kept as the codes of its rounded values instead of floats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fractrain_fx.config import CODE_BITS
from fractrain_fx.errors import ModelError
from fractrain_fx.formats import AffineFormat, ValueRange
from fractrain_fx.nn.full_precision import FullPrecision

__all__ = ["FrozenWeight"]

_HALF = CODE_BITS // 2  # codes of at most this many bits share a byte with another one


class FrozenWeight(FullPrecision):
    """The level number of each value, and the range of each output channel.

    The values are bit for bit those that format ``affine`` gave the float weight ``w``, which is finite. Rounding these
    values once more would not give them again: the range that is measured on them may be off by the last bit. So the
    range is kept.

    The module also stands in the place of the parameter: a torch function that gets it runs with the values, which live
    for that call only. Their type, ``dtype``, follows casts of the model.

    ``bits`` are 1 to 8. Two codes of at most 4 bits lie in one byte, the first in the lower half: ``codes`` has shape
    ``(..., n)``, or then ``(..., (n + 1) // 2)``. It is a parameter, so that processes share it once, or shard it, as
    they do with the weights of the model. ``dim`` holds the output channels; it is ``None`` for a vector.
    """

    codes: nn.Parameter
    lo: Tensor
    span: Tensor
    bits: Tensor

    def __init__(self, w: Float[Tensor, "*dims"], bits: int, fmt: AffineFormat, dim: int | None, name: str) -> None:
        super().__init__()
        self.name, self.width, self.dtype, self._last, self._fmt = name, bits, w.dtype, w.shape[-1], fmt
        w = w.detach()
        within = fmt.weight_range(w, dim=dim)
        self.register_buffer("bits", torch.tensor(bits, dtype=torch.int32, device=w.device))
        signed = fmt.codes(w.to(within.lo.dtype), self.bits, within)
        levels = (signed.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
        codes = _paired(levels) if bits <= _HALF else levels
        self.codes = nn.Parameter(codes.contiguous(), requires_grad=False)
        self.register_buffer("lo", within.lo)
        self.register_buffer("span", within.span)

    @property
    def within(self) -> ValueRange:
        """The range of each channel, measured on the float weight."""
        return ValueRange(self.lo, self.span, True)

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight."""
        return torch.Size((*self.codes.shape[:-1], self._last))

    @property
    def device(self) -> torch.device:
        """The device of the codes."""
        return self.codes.device

    @property
    def data(self) -> Tensor:
        """Refused, because whoever reads it writes to it (PEFT merges adapters so)."""
        raise ModelError(
            f"{self.name} is kept as codes, which cannot be written to: call model.restore(), which puts its rounded "
            "values back as a float parameter, and merge or change that"
        )

    def values(
        self,
        codes: UInt8[Tensor, "*packed"] | None = None,
        at: tuple[Tensor, ValueRange] | None = None,
        out: Float[Tensor, "*dims"] | None = None,
    ) -> Float[Tensor, "*dims"]:
        """The rounded weight, written to ``out`` if given, which has the type of the range.

        ``codes`` are given where they come along a graph, as when they were gathered from several processes; so is
        ``at``, bits and ranges.
        """
        codes = self.codes if codes is None else codes
        bits, within = (self.bits, self.within) if at is None else at
        if self.width <= _HALF:
            codes = torch.stack((codes & 15, codes >> _HALF), dim=-1).flatten(-2)[..., : self._last]
        levels = codes.to(within.lo.dtype) if out is None else out.copy_(codes)
        return self._fmt.values(levels, bits, within).to(self.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(cls, cls.values, (args, dict(kwargs or {})))
        return func(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.lo.device)).dtype
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        bits = state_dict.get(f"{prefix}bits")
        if isinstance(bits, Tensor) and int(bits) != self.width:
            errors: list[str] = args[-1]
            errors.append(
                f"the checkpoint keeps {self.name} as codes of {int(bits)} bits, and the model of {self.width}"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)


def _paired(levels: UInt8[Tensor, "*dims"]) -> UInt8[Tensor, "*packed"]:
    """Two neighbours of the last dimension in one byte."""
    levels = nn.functional.pad(levels, (0, levels.shape[-1] % 2))
    return levels[..., ::2] | (levels[..., 1::2] << _HALF)
