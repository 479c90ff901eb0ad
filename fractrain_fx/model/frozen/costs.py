"""Keep costs in step with the trained parameters: a frozen layer has no GC, and layers before it may have no EB."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from fractrain_fx.capture import RecordedModule
from fractrain_fx.config import FracConfig
from fractrain_fx.config.targets import CostReach
from fractrain_fx.passes import MeterCost, reach_of
from fractrain_fx.passes.analyse.trained import follow_trained, places_of, trained_now

__all__ = ["Frozen"]

_ROUNDING = 1e-9  # in per cent of cost


class Frozen:
    """Notices when parameters were frozen or unfrozen, and updates costs, after a call of ``changed``.

    A check reads one flag of each parameter (some 30 ns). It changes no graph, because costs are tables in buffers.
    """

    def __init__(self, graphs: Sequence[RecordedModule], config: FracConfig, changed: Callable[[], None]) -> None:
        self._graphs = graphs
        self._config = config
        self._changed = changed
        self._places = places_of(graphs[0])
        self._flags = trained_now(self._places)

    def follow(self, reach: CostReach | None, targets: Sequence[float]) -> CostReach | None:
        """Change ops and costs if parameters were frozen or unfrozen since the last call, and give the present reach.

        Warns of ``targets``, the cp of each stage in per cent, outside it.
        """
        flags = trained_now(self._places)
        if flags == self._flags:
            return reach
        self._flags = flags
        self._changed()
        for graph_module in self._graphs:
            follow_trained(graph_module)
            MeterCost(self._config).refresh(graph_module)
        if reach is None:
            return None
        reach = reach_of(self._graphs[0], self._config)
        low, high = reach.interval
        missed = [target for target in targets if not low - _ROUNDING <= target <= high + _ROUNDING]
        if missed:
            warnings.warn(
                f"with the parameters that are frozen now, the gates reach a cp of {low:.3g} to {high:.3g} %, and not "
                f"the target(s) {', '.join(f'{target:g}' for target in missed)} %: freeze before fractrainify, or set "
                "FracConfig(targets=...) within that reach",
                stacklevel=5,
            )
        return reach
