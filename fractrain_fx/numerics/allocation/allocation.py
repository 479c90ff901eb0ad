"""What ``allocate`` returns: the precision of each op, for a whole training or stage by stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from fractrain_fx.config import FracConfig, Pin
from fractrain_fx.config.plain import write_yaml
from fractrain_fx.config.precision import Precision, PrecisionStages
from fractrain_fx.config.products import Recipe
from fractrain_fx.config.recipes import RECIPES
from fractrain_fx.numerics.allocation.price import Unit
from fractrain_fx.numerics.sensitivity import Sensitivities
from fractrain_fx.numerics.table import Printed, table
from fractrain_fx.passes.graph.contractions import OPAQUE_KINDS, UNSPLIT_KINDS

__all__ = ["FILE", "Allocation", "StagedAllocation"]

FILE = "allocation.yaml"
"""The file in a run's folder."""

_LABELS = ("first", "last", "depthwise", "constant")  # of ops, in place of a name in a rule
_UNITS = {"cp": "% of training at 32 bits", "joules": "joules a step", "seconds": "seconds a step"}


class _Trainable(Printed, ABC):
    """Widths that a run can train at."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The settings that train at these widths, as plain values."""

    @property
    def config(self) -> FracConfig:
        """The configuration that trains at these widths; ``config.replace(...)`` sets the rest."""
        return FracConfig.from_dict(self.settings)

    def to_yaml(self, path: str | Path, run: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Write settings for ``fractrain train --config``.

        Args:
            path: of the file.
            run: settings beside those of the method, such as ``model`` and ``data``.
        """
        # Among the settings of a run `recipe` names one of the paper's.
        own = {"format_recipe" if key == "recipe" else key: value for key, value in self.settings.items()}
        write_yaml(path, {**run, **own})


@dataclass(frozen=True)
class Allocation(_Trainable):
    """The precision of each measured op, for ``method="static"``. Prints as a table.

    Attributes:
        precisions: by name of the op.
        sensitivities: from which they were chosen. Their number formats are part of ``pins`` and ``settings``.
        cost: what training costs, in ``unit``; for ``cp`` the ``cp_total`` in per cent.
        budget: what it may cost.
        unit: ``cp``, ``joules`` or ``seconds`` (of a training step).
        harm: the expected change of the loss.
    """

    precisions: Mapping[str, Precision]
    sensitivities: Sensitivities = field(repr=False)
    cost: float
    budget: float
    unit: Unit
    harm: float

    @property
    def pins(self) -> tuple[Pin, ...]:
        """A rule for each op, and for those that a rule keeps in float or bfloat16."""
        return _pins_of(self.precisions, self.sensitivities)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that train at these widths, as plain values."""
        return {"method": "static", **deepcopy(self.sensitivities.settings), "pins": list(map(_plain, self.pins))}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from _table((self,))


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
    def pins(self) -> tuple[Pin, ...]:
        """A rule for each op, and for those that a rule keeps in float or bfloat16."""
        first, *_ = self.stages
        bits = {
            name: PrecisionStages(tuple(stage.precisions[name] for stage in self.stages)) for name in first.precisions
        }
        return _pins_of(bits, first.sensitivities)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that train at these widths, as plain values."""
        formats = {name: value for name, value in self.stages[0].sensitivities.settings.items() if name != "precision"}
        return {"method": "pfq", "stages": str(self.names), **deepcopy(formats), "pins": list(map(_plain, self.pins))}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from _table(self.stages)


def _pins_of(
    bits: Mapping[str, Precision] | Mapping[str, PrecisionStages], sensitivities: Sensitivities
) -> tuple[Pin, ...]:
    """A rule for each op that has bits, and for those that must not get the bits of others."""
    words, general = {*_LABELS, *(op.kind for op in sensitivities.ops)}, {op.module for op in sensitivities.ops}
    usual, pins = sensitivities.settings.get("format", "affine"), list[Pin]()
    # A name that is also the module of other ops matches these too, so that their own rules have to come later.
    for op in sorted(sensitivities.ops, key=lambda op: op.name not in general):
        # A bracket, because a rule for the kind ``conv`` is for all ops of this kind.
        pattern = f"[{op.name[0]}]{escape(op.name[1:])}" if op.name in words else escape(op.name)
        if op.name in bits:
            pins.append(_pin(pattern, bits[op.name], op.rule or (None if op.format == usual else op.format)))
        elif op.rule is not None or (op.module in bits and op.kind not in (*OPAQUE_KINDS, *UNSPLIT_KINDS)):
            pins.append(_pin(pattern, None, op.rule or "float"))
    return tuple(pins)


def _pin(pattern: str, bits: Precision | PrecisionStages | None, rule: str | Recipe | None) -> Pin:
    """A rule with a format or a recipe."""
    if isinstance(rule, Recipe) or rule in RECIPES:
        return Pin(pattern, bits, recipe=rule)
    return Pin(pattern, bits, format=rule)


def _plain(pin: Pin) -> str | dict[str, Any]:
    """A rule as text, or as a mapping if its recipe has no name."""
    return pin.to_dict() if isinstance(pin.recipe, Recipe) else str(pin)


def _table(stages: Sequence[Allocation]) -> Iterator[RenderableType]:
    """A row for each op with its precision in each stage, and what each stage costs."""
    several = len(stages) > 1
    grid = table(["op", *(f"stage {number}" if several else "precision" for number in range(1, len(stages) + 1))])
    for name in stages[0].precisions:
        precisions = [stage.precisions[name] for stage in stages]
        grid.add_row(Text(name), *(f"{bits.fw}/{bits.bw}" if several else str(bits) for bits in precisions))
    yield grid
    for number, stage in enumerate(stages, 1):
        cost = f"costs {stage.cost:.4g} of {stage.budget:.4g} {_UNITS[stage.unit]}"
        words = f"{cost}; expected change of the loss {stage.harm:.3g}"
        yield Text(f"stage {number} {words}" if several else words)
