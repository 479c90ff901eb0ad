"""Refuse wrong arguments of the engine's methods, and say what to pass."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from fractrain_fx.errors import ConfigError, InputError

__all__ = ["check_batch", "require_batches", "require_number"]


def check_batch(mean: Any, weight: Any, tokens: Any) -> None:
    """Check the optional arguments of ``Engine.loss``.

    Raises:
        InputError: ``mean`` is not a tensor of one number, ``weight`` not a finite number above 0, or ``tokens`` not a
            whole number from 0 on.
    """
    if mean is not None and not (isinstance(mean, Tensor) and mean.numel() == 1):
        raise InputError(
            f"engine.loss got mean={_shown(mean)}: pass the mean task loss of the batch, as a tensor of one number"
        )
    if weight is not None and not (_is_a(Real, weight) and 0 < weight < math.inf):
        raise InputError(
            f"engine.loss got weight={_shown(weight)}: pass the number by which the loop divides the loss, above 0 and "
            "finite, or leave it out"
        )
    if tokens is not None and not (_is_a(Integral, tokens) and tokens >= 0):
        raise InputError(f"engine.loss got tokens={_shown(tokens)}: pass the number of tokens of the batch, as an int")


def require_batches(accumulate: Any) -> int:
    """The batches of an optimizer step.

    Raises:
        ConfigError: not a whole number from 1 on.
    """
    if not _is_a(Integral, accumulate) or accumulate < 1:
        raise ConfigError(
            f"accumulate={_shown(accumulate)} must be a whole number of batches for an optimizer step, at least 1"
        )
    return int(accumulate)


def require_number(mean_loss: Any) -> float:
    """The loss that ``Engine.end_epoch`` is given.

    Raises:
        InputError: neither a number nor a tensor of one.
    """
    fits = mean_loss.numel() == 1 if isinstance(mean_loss, Tensor) else _is_a(Real, mean_loss)
    if not fits:
        raise InputError(f"end_epoch got mean_loss={_shown(mean_loss)}: pass the mean loss of the epoch, as a number")
    return float(mean_loss)


def _is_a(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
