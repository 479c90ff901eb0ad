"""Choose the cost targets of a model's gates, check that they can be reached, and the precision that follows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fractrain_fx.config import FracConfig
from fractrain_fx.config.precision import CostTargets, Precision
from fractrain_fx.errors import TargetError

__all__ = ["CostReach", "resolve_targets", "scheduled_precision"]

_DEFAULTS = {"fractrain": CostTargets().per_cent, "dfq": CostTargets().per_cent[-1:], "slu": (50.0,)}

# Distance of a moved default from the lowest reachable cp, as a share of the reachable interval.
_MARGIN = 0.05


@dataclass(frozen=True)
class CostReach:
    """The costs that a model with gates can have, in MACs of a training step for one sample.

    Attributes:
        gated: the cheapest and the dearest choices of the gates.
        gated_macs: full-precision MACs of the gated ops.
        macs: full-precision MACs of the gated and scheduled ops.
        scheduled: what the scheduled ops cost at each precision.
    """

    gated: tuple[float, float]
    gated_macs: float
    macs: float
    scheduled: Mapping[Precision, float]

    @property
    def interval(self) -> tuple[float, float]:
        """The lowest and the highest cp, in per cent."""
        ends = self.scheduled.values()
        return self._cp(self.gated[0] + min(ends)), self._cp(self.gated[1] + max(ends))

    @property
    def gated_share(self) -> float:
        """The gated ops as a share (0..1) of the ops that cp is over."""
        return self.gated_macs / self.macs if self.gated_macs else 1.0

    def at(self, precision: Precision) -> tuple[float, float]:
        """The lowest and the highest cp, in per cent, with the scheduled ops at a precision."""
        spent = self.scheduled[precision]
        return self._cp(self.gated[0] + spent), self._cp(self.gated[1] + spent)

    def _cp(self, spent: float) -> float:
        return 100 * spent / self.macs if self.macs else 0.0


def scheduled_precision(config: FracConfig, target: float) -> Precision:
    """The precision of ops that no gate can choose for, in a stage with a target cp (in per cent).

    It is the dearest option of the gates that costs no more than the target; the cheapest that computes, if all cost
    more. The gates make up for the rest, because cp is over both.
    """
    affordable = [
        option for option in config.precision_stages if 100 * option.mean_share(config.gate_weight_bits) <= target
    ]
    return affordable[-1] if affordable else config.precision_stages[0]


def resolve_targets(config: FracConfig, reach: CostReach) -> tuple[float, ...]:
    """The target cp of each stage, in per cent.

    Targets that the user set stay as they are; with ``saturate``, a target out of reach becomes the nearest cp
    in reach. The defaults are moved for a model whose gates cannot reach them, because of its options or of ops that
    follow the stage. They keep their distances as far as there is room.

    Args:
        config: its ``method`` and ``targets`` decide.
        reach: what the model can cost.

    Raises:
        TargetError: a target that the user set is out of reach and may not saturate.
    """
    if config.targets is None:
        return tuple(_nearest(config, target, reach) for target in _move(_DEFAULTS[config.method], *reach.interval))
    targets = config.targets.per_cent if config.method == "fractrain" else config.targets.per_cent[-1:]
    nearest = tuple(_nearest(config, target, reach) for target in targets)
    if config.targets.saturate:
        return nearest
    for target, near in zip(targets, nearest, strict=True):
        if target != near:
            low, high = reach.interval
            raise TargetError(
                f"target cp {target:g} % cannot be reached: with {config.gate_weight_bits}-bit weights and options "
                f"{', '.join(map(str, config.gate_options))} this model's gates reach {low:.3f} to {high:.3f} %"
                f"{_with_scheduled(config, target, reach)}. "
                "Set targets in that range, other options or weight_bits, or CostTargets(..., saturate=True) to take "
                "the nearest"
            )
    return targets


def _nearest(config: FracConfig, target: float, reach: CostReach) -> float:
    low, high = reach.at(scheduled_precision(config, target))
    return min(max(target, low), high)


def _with_scheduled(config: FracConfig, target: float, reach: CostReach) -> str:
    if reach.gated_share == 1:
        return ""
    precision = scheduled_precision(config, target)
    low, high = reach.at(precision)
    share = 100 * (1 - reach.gated_share)
    return f" ({low:.3f} to {high:.3f} % with the {share:.0f} % that no gate can choose for at {precision})"


def _move(targets: tuple[float, ...], low: float, high: float) -> tuple[float, ...]:
    margin = _MARGIN * (high - low)
    if targets[0] >= low and targets[-1] <= high:
        return targets
    start = max(targets[0], low + margin)
    start = min(start, high - margin)
    room = max(high - margin - start, 0.0)
    reach = targets[-1] - targets[0]
    squeeze = min(1.0, room / reach) if reach else 1.0
    return tuple(start + (target - targets[0]) * squeeze for target in targets)
