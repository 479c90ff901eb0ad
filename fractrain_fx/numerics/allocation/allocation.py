"""What ``allocate`` returns: the precision of each op, for a whole training or stage by stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console, ConsoleOptions, RenderResult

from fractrain_fx.config import FracConfig, Pin
from fractrain_fx.config.precision import Precision, PrecisionStages
from fractrain_fx.durable import write_text
from fractrain_fx.numerics.allocation.price import Unit

__all__ = ["FILE", "Allocation", "StagedAllocation"]

FILE = "allocation.yaml"
"""The file in a run's folder."""


class _Settings:
    """Rules for each op as settings of a training."""

    modules: Mapping[str, str]

    @property
    def _bits(self) -> Mapping[str, Precision | PrecisionStages]:
        raise NotImplementedError

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that train at these widths, as plain values."""
        raise NotImplementedError

    @property
    def pins(self) -> tuple[Pin, ...]:
        """A rule for each op."""
        # A name that is also the module of other ops matches these too, so that their own rules have to come later.
        bits, modules = self._bits, set(self.modules.values())
        return tuple(Pin(escape(name), bits[name]) for name in sorted(bits, key=lambda name: name not in modules))

    @property
    def config(self) -> FracConfig:
        """The configuration that trains at these widths; ``config.replace(...)`` sets the rest."""
        return FracConfig.from_dict(self.settings)

    def to_yaml(self, path: str | Path) -> None:
        """Write settings for ``fractrain train --config``."""
        write_text(Path(path), yaml.safe_dump(self.settings, width=120, sort_keys=False))


@dataclass(frozen=True)
class Allocation(_Settings):
    """The precision of each measured op, for ``method="static"``. Prints as a table.

    Attributes:
        precisions: by name of the op.
        modules: the module of each op.
        cost: what training costs, in ``unit``; for ``cp`` the ``cp_total`` in per cent.
        budget: what it may cost.
        unit: ``cp``, ``joules`` or ``seconds`` (of a training step).
        harm: the expected change of the loss.
    """

    precisions: Mapping[str, Precision]
    modules: Mapping[str, str]
    cost: float
    budget: float
    unit: Unit
    harm: float

    @property
    def _bits(self) -> Mapping[str, Precision]:
        return self.precisions

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that train at these widths, as plain values."""
        return {"method": "static", "pins": [str(pin) for pin in self.pins]}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from fractrain_fx.numerics.allocation.table import allocation_table

        yield from allocation_table((self,))


@dataclass(frozen=True)
class StagedAllocation(_Settings):
    """The precision of each measured op in each stage, for ``method="pfq"``. Prints as a table.

    Attributes:
        stages: the allocation of each stage. An op's widths never fall from one to the next.
        names: for each stage the uniform precision that costs nearest to its budget. It names the stage, and ops that
            no rule pins have it.
    """

    stages: tuple[Allocation, ...]
    names: PrecisionStages

    @property
    def modules(self) -> Mapping[str, str]:  # type: ignore[override]
        """The module of each op."""
        return self.stages[0].modules

    @property
    def _bits(self) -> Mapping[str, PrecisionStages]:
        return {
            name: PrecisionStages(tuple(stage.precisions[name] for stage in self.stages))
            for name in self.stages[0].precisions
        }

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that train at these widths, as plain values."""
        return {"method": "pfq", "stages": str(self.names), "pins": [str(pin) for pin in self.pins]}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from fractrain_fx.numerics.allocation.table import allocation_table

        yield from allocation_table(self.stages)
