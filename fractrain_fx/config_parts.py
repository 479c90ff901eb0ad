"""What a configuration holds beside numbers and words: rules for single contractions, and its gates."""

from __future__ import annotations

from dataclasses import dataclass

from fractrain_fx.errors import ConfigError
from fractrain_fx.precision import Precision

__all__ = ["GateConfig", "Pin"]


@dataclass(frozen=True)
class Pin:
    """A rule: contractions that match ``pattern`` keep ``precision`` in every stage and for every input.

    ``pattern`` is a shell-style pattern over op names (``blocks.0.*``), a kind of op (``linear``), ``depthwise`` or
    ``first``/``last``. Later rules win. ``Pin("depthwise", Precision(8, 16))`` is the paper's for MobileNetV2.
    """

    pattern: str
    precision: Precision

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", Precision.parse(self.precision))
        if not self.pattern:
            raise ConfigError("a Pin needs a pattern, for example Pin('layer4.*', Precision(8, 8))")
        if self.precision.skips:
            raise ConfigError(f"Pin({self.pattern!r}) at {self.precision} would remove the op: write 2 bits or more")


@dataclass(frozen=True)
class GateConfig:
    """DFQ's gates and what steers them (paper 3.2; ALGORITHM 3 and 5).

    Attributes:
        dims: widths of the two linear layers that embed a block's entry.
        hidden: width of the LSTM cell shared by all blocks.
        beta: strength of the cost term for one sample's choice in one block of mean size.
        width: dead band above the target, in per cent of cost, in which the cost term is off.
    """

    dims: tuple[int, int] = (32, 16)
    hidden: int = 16
    beta: float = 1e-3
    width: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", tuple(int(dim) for dim in self.dims))
        if len(self.dims) != 2 or min(*self.dims, self.hidden) < 1:
            raise ConfigError(
                f"gate sizes dims={self.dims}, hidden={self.hidden} must be two widths and one, all at least 1"
            )
        if not (self.beta > 0 and self.width >= 0):
            raise ConfigError(f"beta={self.beta} must be above 0 and width={self.width} at least 0")
