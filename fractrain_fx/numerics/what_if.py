"""Formats and precisions that a tensor is rounded in for comparison, beside the ones that train."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fractrain_fx.config import AffineConfig, Pin, Precision
from fractrain_fx.config.products import Recipe
from fractrain_fx.config.recipes import widths_of
from fractrain_fx.errors import ConfigError
from fractrain_fx.execution.plan import Call, Plan, Rounds
from fractrain_fx.formats import Format, ValueRange, get_format

__all__ = ["WhatIf", "read_what_ifs"]


@dataclass(frozen=True)
class WhatIf:
    """Another precision of activations and weights, and of gradients, and perhaps another number format.

    ``name`` is as the user wrote it; ``fmt`` is ``None`` for the op's own format.
    """

    name: str
    precision: Precision
    fmt: Format | None = None

    def format_for(self, own: Format) -> Format:
        """The format of an operand whose own is ``own``."""
        return self.fmt or own

    def applied(self, plan: Plan, call: Call) -> tuple[Plan, Call]:
        """An op, and a call of it, as they would be in this format and precision."""
        first, second = (replace(factor, fmt=self.format_for(factor.fmt)) for factor in (plan.first, plan.second))
        other = replace(plan, first=first, second=second, fmt=self.format_for(plan.fmt))
        of_a, of_b = (self._rounds(rounds, x) for rounds, x in ((call.of_a, call.a), (call.of_b, call.b)))
        bits = None if call.bits is None else _number(self.precision.bw, call.a)
        return other, call._replace(of_a=of_a, of_b=of_b, bits=bits)

    def _rounds(self, rounds: Rounds, x: Tensor) -> Rounds:
        return Rounds(_number(self.precision.fw, x), self.range_of(rounds.within))

    def range_of(self, own: ValueRange | None) -> ValueRange | None:
        """The range of an operand; that of another format is measured anew."""
        return own if self.fmt is None else None


def read_what_ifs(
    given: str | Iterable[str], recipes: Sequence[Recipe | None], affine: AffineConfig
) -> tuple[WhatIf, ...]:
    """Read names of recipes and formats (``mxfp4``, ``mx:FW-4/BW-8``) and precisions (``FW-4/BW-8``).

    ``Pin.parse`` reads names so after the pattern. ``recipes`` are those of the model's ops, ``None`` for ops without
    one; ``affine`` has the model's settings of that format, which a name of it has too.
    """
    names = (given,) if isinstance(given, str) else tuple(given)
    return tuple(_read(str(name), recipes, affine) for name in names)


def _read(name: str, recipes: Sequence[Recipe | None], affine: AffineConfig) -> WhatIf:
    try:
        pin = Pin.parse(f"*={name}")
    except ConfigError as error:
        raise ConfigError(
            f"as_if={name!r} is neither a format or recipe (mxfp4, nvfp4, mx:FW-4/BW-8) nor a precision (FW-4/BW-8): "
            f"{error}"
        ) from error
    if not isinstance(pin.precision, Precision):
        raise ConfigError(f"as_if={name!r} names several precisions: write one, such as {pin.precision.stages[-1]}")
    if pin.number_format is not None:
        fmt = get_format(pin.number_format, affine=affine, recipe=pin.product_recipe)
        return WhatIf(name, pin.precision, fmt)
    for recipe in recipes:
        if recipe is not None and (lacks := widths_of(recipe, pin.precision)) is not None:
            raise ConfigError(f"as_if={name!r}: {lacks}. Name a format too, such as 'affine:{pin.precision}'")
    return WhatIf(name, pin.precision)


def _number(bits: int, like: Tensor) -> Tensor:
    return torch.tensor(bits, device=like.device)
