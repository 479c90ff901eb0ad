"""Costs that follow which parameters are trained: a frozen layer has no GC, and nothing before it may need EB."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from fractrain_fx.capture import RecordedModule
from fractrain_fx.config import FracConfig
from fractrain_fx.passes import MeterCost, reachable
from fractrain_fx.passes.analyse.trained import Place, follow_trained, places_of

__all__ = ["Frozen"]

_ROUNDING = 1e-9  # of the reach, in per cent


class Frozen:
    """Looks whether parameters were frozen or unfrozen, and changes costs if so.

    A look reads one flag of each parameter (some 30 ns), and changes no graph: costs are tables in buffers.

    Args:
        graphs: the rewritten graphs of a model.
        config: what they were rewritten with.
        changed: is called when costs changed.
    """

    def __init__(self, graphs: Sequence[RecordedModule], config: FracConfig, changed: Callable[[], None]) -> None:
        self._graphs = graphs
        self._config = config
        self._changed = changed
        self._places: list[Place] = places_of(graphs[0])
        self._flags = self._read()

    def follow(
        self, reach: tuple[float, float] | None, targets: Sequence[float], *, anew: bool = False
    ) -> tuple[float, float] | None:
        """Change ops and costs if parameters were frozen or unfrozen since the last call.

        Args:
            reach: lowest and highest cp in per cent that the gates could choose.
            targets: cp of each stage in per cent.
            anew: compute costs whether or not anything changed.

        Returns:
            The present reach. Targets that are left outside it are a warning.
        """
        flags = self._read()
        if flags == self._flags and not anew:
            return reach
        self._flags = flags
        self._changed()
        for graph_module in self._graphs:
            follow_trained(graph_module)
            MeterCost(self._config).refresh(graph_module)
        if reach is None:
            return None
        low, high = reachable(self._graphs[0], self._config)
        missed = [target for target in targets if not low - _ROUNDING <= target <= high + _ROUNDING]
        if missed and not anew:
            warnings.warn(
                f"with the parameters that are frozen now, the gates reach a cp of {low:.3g} to {high:.3g} %, and not "
                f"the target(s) {', '.join(f'{target:g}' for target in missed)} %: freeze before fractrainify, or set "
                "FracConfig(targets=...) within that reach",
                stacklevel=5,
            )
        return low, high

    def _read(self) -> list[bool | None]:
        return [None if (p := parameters.get(name)) is None else p.requires_grad for parameters, name in self._places]
