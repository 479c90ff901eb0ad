"""Choose the cost targets of a model's gates, and check that the gates can reach them."""

from __future__ import annotations

from fractrain_fx.config import FracConfig
from fractrain_fx.errors import TargetError

__all__ = ["resolve_targets"]

_DEFAULTS = {"fractrain": (1.5, 2.0, 2.5, 3.0), "dfq": (3.0,), "slu": (50.0,)}

# Distance of a moved default from the lowest reachable cp, as a share of the reachable interval.
_MARGIN = 0.05


def resolve_targets(config: FracConfig, low: float, high: float) -> tuple[float, ...]:
    """The target cp of each stage, in per cent.

    Targets that the user set stay as they are; with ``saturate_targets``, a target out of reach becomes the nearest cp
    in reach. The defaults (paper 4.4) are moved up for a model whose gates cannot reach them because it has blocks
    without a skip path. They keep their distances as far as there is room.

    Args:
        config: its ``method`` and ``targets`` decide.
        low: lowest cp that the gates can choose, in per cent.
        high: highest cp that the gates can choose, in per cent.

    Raises:
        TargetError: a target that the user set is not between ``low`` and ``high`` and may not saturate.
    """
    if config.targets is None:
        return _move(_DEFAULTS[config.method], low, high)
    targets = config.targets.per_cent if config.method == "fractrain" else config.targets.per_cent[-1:]
    if config.saturate_targets:
        return tuple(min(max(target, low), high) for target in targets)
    for target in targets:
        if not low <= target <= high:
            raise TargetError(
                f"target cp {target:g} % cannot be reached: with {config.gate_weight_bits}-bit weights and options "
                f"{', '.join(map(str, config.gate_options))} this model's gates reach {low:.3f} to {high:.3f} %. "
                "Set targets in that range, other options or weight_bits, or saturate_targets=True to take the nearest"
            )
    return targets


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
