"""What ``allocate`` returns: the precision of each op, for a whole training or stage by stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from fractrain_fx.config import FracConfig, Pin
from fractrain_fx.config.plain import write_yaml
from fractrain_fx.config.precision import Precision, PrecisionStages
from fractrain_fx.numerics.allocation.price import Unit
from fractrain_fx.numerics.table import printed

__all__ = ["FILE", "Allocation", "StagedAllocation"]

FILE = "allocation.yaml"
"""The file in a run's folder."""

_UNITS = {"cp": "% of training at 32 bits", "joules": "joules a step", "seconds": "seconds a step"}


class _Trainable(ABC):
    """Widths that a run can train at."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The settings that train at these widths, as plain values."""

    @property
    def config(self) -> FracConfig:
        """The configuration that trains at these widths; ``config.replace(...)`` sets the rest."""
        return FracConfig.from_dict(self.settings)

    def to_yaml(self, path: str | Path) -> None:
        """Write settings for ``fractrain train --config``."""
        write_yaml(path, self.settings)


@dataclass(frozen=True)
class Allocation(_Trainable):
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
    def pins(self) -> tuple[Pin, ...]:
        """A rule for each op."""
        return _pins_of(self.precisions, self.modules)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that train at these widths, as plain values."""
        return {"method": "static", "pins": [str(pin) for pin in self.pins]}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from _table((self,))

    def __str__(self) -> str:
        return printed(self)


@dataclass(frozen=True)
class StagedAllocation(_Trainable):
    """The precision of each measured op in each stage, for ``method="pfq"``. Prints as a table.

    Attributes:
        stages: the allocation of each stage. An op's widths never fall from one to the next.
        names: for each stage the uniform precision that costs nearest to its budget. It names the stage, and ops that
            no rule pins have it.
    """

    stages: tuple[Allocation, ...]
    names: PrecisionStages

    @property
    def modules(self) -> Mapping[str, str]:
        """The module of each op."""
        return self.stages[0].modules

    @property
    def pins(self) -> tuple[Pin, ...]:
        """A rule for each op."""
        first, *_ = self.stages
        bits = {
            name: PrecisionStages(tuple(stage.precisions[name] for stage in self.stages)) for name in first.precisions
        }
        return _pins_of(bits, first.modules)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that train at these widths, as plain values."""
        return {"method": "pfq", "stages": str(self.names), "pins": [str(pin) for pin in self.pins]}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from _table(self.stages)

    def __str__(self) -> str:
        return printed(self)


def _pins_of(
    bits: Mapping[str, Precision] | Mapping[str, PrecisionStages], modules: Mapping[str, str]
) -> tuple[Pin, ...]:
    """A rule for each op."""
    # A name that is also the module of other ops matches these too, so that their own rules have to come later.
    general = set(modules.values())
    return tuple(Pin(escape(name), bits[name]) for name in sorted(bits, key=lambda name: name not in general))


def _table(stages: Sequence[Allocation]) -> Iterator[RenderableType]:
    """A row for each op with its precision in each stage, and what each stage costs."""
    several = len(stages) > 1
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("op", overflow="ellipsis", no_wrap=True)
    for number in range(1, len(stages) + 1):
        table.add_column(f"stage {number}" if several else "precision", no_wrap=True)
    for name in stages[0].precisions:
        precisions = [stage.precisions[name] for stage in stages]
        table.add_row(Text(name), *(f"{each.fw}/{each.bw}" if several else str(each) for each in precisions))
    yield table
    for number, found in enumerate(stages, 1):
        cost = f"costs {found.cost:.4g} of {found.budget:.4g} {_UNITS[found.unit]}"
        words = f"{cost}; expected change of the loss {found.harm:.3g}"
        yield Text(f"stage {number} {words}" if several else words)
