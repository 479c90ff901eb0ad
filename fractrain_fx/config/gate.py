"""The gates of a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fractrain_fx.config.kinds import check_kinds, require_numbers
from fractrain_fx.errors import ConfigError

__all__ = ["Control", "GateConfig", "GateGradient", "GateInit"]

Control = Literal["sign", "multiplier"]
GateInit = Literal["linear", "he"]
GateGradient = Literal["straight-through", "fisher"]


@dataclass(frozen=True)
class GateConfig:
    """DFQ's gates and their steering (paper 3.2).

    Attributes:
        dims: widths of the two linear layers that embed a block's entry.
        hidden: width of the LSTM cell shared by all blocks.
        init: initial weights of the two linear layers. ``he``: He's rule for the fan-out, as in the authors' code, so
            that choices differ between samples from the start. ``linear``: as in ``nn.Linear``.
        gradient: what an option's gradient says about its rounding. ``straight-through``: what the rounding errors of
            this batch do to the loss in first order, as in the paper; from sample to sample that is mostly noise.
            ``fisher``: what errors of that size do to it on average, in second order, where the squared gradients of a
            sample stand for the curvature. Skipping a block has the paper's gradient under both.
        beta: strength of the cost term: what the mean option that computes adds to the loss, for one sample in one
            block of mean size.
        dead_band: width of the band above the target, in per cent of cost, in which the error of cp counts as 0.
        control: how the strength follows ``e``, the relative error of cp. ``multiplier``: a Lagrange multiplier, moved
            by ``beta * integral_gain * e`` in each step, plus ``beta * gain * e``; it has no bound. ``sign``: ``beta``
            times the sign of ``e``, as in the paper.
        gain: proportional gain of a multiplier.
        integral_gain: its integral gain of a step.
    """

    dims: tuple[int, int] = (32, 16)
    hidden: int = 16
    init: GateInit = "he"
    gradient: GateGradient = "straight-through"
    beta: float = 1e-3
    dead_band: float = 0.0
    control: Control = "sign"
    gain: float = 4.0
    integral_gain: float = 0.02

    def __post_init__(self) -> None:
        check_kinds(self, "gate.")
        require_numbers("gate.dims", self.dims, "[32, 16]", whole=True)
        object.__setattr__(self, "dims", tuple(int(dim) for dim in self.dims))
        if len(self.dims) != 2 or min(*self.dims, self.hidden) < 1:
            raise ConfigError(
                f"gate sizes dims={self.dims}, hidden={self.hidden} must be two widths and one, all at least 1"
            )
        if not 0 < self.beta < float("inf"):
            raise ConfigError(f"gate.beta={self.beta} must be above 0 and finite")
        if not 0 <= self.dead_band < float("inf"):
            raise ConfigError(f"gate.dead_band={self.dead_band} must be at least 0 and finite")
        for name in ("gain", "integral_gain"):
            value = getattr(self, name)
            if self.control == "sign" and value != getattr(GateConfig, name):
                raise ConfigError(
                    f"gate.{name}={value} changes nothing with control={self.control!r}: leave it out, or write "
                    "control='multiplier'"
                )
            if not 0 < value < float("inf"):
                raise ConfigError(f"gate.{name}={value} must be above 0 and finite")
