"""FracConfig: frozen, validated; its defaults are the settings that trained best (docs/background/gates.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fractrain_fx.config.affine import AffineConfig
from fractrain_fx.config.checks import check_config
from fractrain_fx.config.gate import GateConfig
from fractrain_fx.config.kinds import check_kinds, require_sequence
from fractrain_fx.config.paper import paper_values
from fractrain_fx.config.pins import Pin, parse_pins
from fractrain_fx.config.plain import changed_fields, given_fields, plain_values, read_yaml, write_yaml
from fractrain_fx.config.precision import (
    FINE_OPTIONS,
    FLOAT_BITS,
    FULL,
    SKIP,
    CostTargets,
    Precision,
    PrecisionStages,
)
from fractrain_fx.config.products import BLOCK_FORMATS, Recipe
from fractrain_fx.config.recipes import recipe_of, usual_recipe
from fractrain_fx.config.run import CODE_BITS, RunConfig
from fractrain_fx.config.schedule import ByLength, Schedule, parse_schedule

__all__ = ["Attention", "FracConfig", "Method"]

Method = Literal["float", "static", "pfq", "dfq", "fractrain", "slu"]
Attention = Literal["quantized", "float"]


@dataclass(frozen=True)
class FracConfig:
    """All settings of training a model with fractional precision.

    Attributes:
        method: ``float``: nothing is rounded; ``static``: one precision; ``pfq``: a precision for each stage; ``dfq``:
            gates choose; ``fractrain``: gates choose, with a target for each stage; ``slu``: gates only skip blocks.
        format: the number format: ``affine`` (SBM, as in the paper), ``dorefa``, ``wageubn``; ``mx``, ``nvfp4`` and
            ``fp8``: small floating-point numbers with shared scales, whose elements follow from the bits; ``int``:
            integers with shared scales.
        recipe: how ``mx``, ``nvfp4``, ``fp8`` or ``int`` rounds the operands of each product: ``mxfp8``, ``mxfp4``,
            ``nvfp4``, ``fp8``, ``jetfire``, ``switchback`` or a :class:`Recipe`. ``None``: the one named like the
            format; ``jetfire`` for ``int``; ``mxfp8`` for ``mx``, or ``mxfp4`` below 8 gradient bits without gates.
        precision: the precision of ``static``.
        stages: the precisions of ``pfq``.
        options: the options of the gates of ``dfq`` and ``fractrain``; ``slu`` has 0/0 and 32/32.
        weight_bits: bits of gated weights.
        targets: cp of each stage of ``fractrain``; ``dfq`` and ``slu`` hold the last one. ``None``: 2.9/3.4/3.6/3.8
            (3.8 for ``dfq``, 50 for ``slu``; in per cent), moved into reach of the model's gates.
            ``CostTargets(..., saturate=True)``: a target out of reach counts as the nearest one in reach instead of
            being an error.
        attention: ``quantized``: fused attention is opened into its two products, which get precisions like all others.
            ``float``: it stays one call in float; quicker, at a higher ``cp_total``. The paper's Transformer has it.
        pins: rules that fix the precision of some contractions, in all stages or in each, and maybe their number format
            (:class:`Pin`).
        affine: how format ``affine`` finds the levels of its numbers (:class:`AffineConfig`).
        gate: sizes and strength of the gates (:class:`GateConfig`).
        schedule: moves the run from stage to stage: :class:`ByLength`, :class:`LossPlateau`, :class:`TwoStage`,
            :class:`Manual`, :class:`Cyclic`, :class:`Fixed` or :class:`Constant`; or its word, for the usual settings:
            ``by-length``, ``auto``, ``two-stage``, ``manual``, ``cyclic``, ``fixed``, ``constant``. ``None`` is
            ``by-length``.
        run: how the model runs, and for how long (:class:`RunConfig`).
    """

    method: Method = "fractrain"
    format: str = "affine"
    recipe: str | Recipe | None = None
    precision: Precision = Precision(8, 8)
    stages: PrecisionStages = field(default_factory=PrecisionStages)
    options: tuple[Precision, ...] = FINE_OPTIONS[1:]
    weight_bits: int = 4
    targets: CostTargets | None = None
    attention: Attention = "quantized"
    pins: tuple[Pin, ...] = ()
    affine: AffineConfig = field(default_factory=AffineConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    schedule: Schedule = field(default_factory=ByLength)
    run: RunConfig = field(default_factory=RunConfig)

    if TYPE_CHECKING:  # text and lists may be written where the fields, which are read, have one type

        def __init__(
            self,
            method: Method = ...,
            format: str = ...,
            recipe: str | Recipe | None = ...,
            precision: Precision | str = ...,
            stages: PrecisionStages | str = ...,
            options: Iterable[Precision | str] = ...,
            weight_bits: int = ...,
            targets: CostTargets | Iterable[float] | None = ...,
            attention: Attention = ...,
            pins: Iterable[Pin] = ...,
            affine: AffineConfig = ...,
            gate: GateConfig = ...,
            schedule: Schedule | str | None = ...,
            run: RunConfig = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        self._normalise()
        check_kinds(self)
        check_config(self)

    def _normalise(self) -> None:
        set_field = object.__setattr__
        set_field(self, "precision", Precision.parse(self.precision))
        if isinstance(self.recipe, Mapping):
            set_field(self, "recipe", recipe_of(self.recipe))
        set_field(self, "stages", PrecisionStages.parse(self.stages))
        require_sequence("options", self.options, "['FW-3/BW-6', 'FW-6/BW-8']")
        set_field(self, "options", tuple(Precision.parse(option) for option in self.options))
        set_field(self, "pins", parse_pins(self.pins))
        set_field(self, "schedule", parse_schedule(self.schedule))
        if self.targets is not None and not isinstance(self.targets, CostTargets):
            require_sequence("targets", self.targets, "[2.9, 3.4, 3.6, 3.8]")
            set_field(self, "targets", CostTargets(tuple(self.targets)))

    @property
    def product_recipe(self) -> Recipe | None:
        """The recipe of a block format, by name or as given; ``None`` for other formats."""
        if self.format not in BLOCK_FORMATS:
            return None
        if self.recipe is not None:
            return recipe_of(self.recipe)
        narrow = self.scheduled and any(stage.bw < CODE_BITS for stage in self.precision_stages)
        return usual_recipe(self.format, narrow=narrow)

    def rounds_anew(self, number_format: str) -> bool:
        """Whether each product of this format rounds its operands anew, under these settings."""
        return number_format in BLOCK_FORMATS or (number_format == "affine" and self.affine.per_product)

    def has_kernels(self, number_format: str) -> bool:
        """Whether kernels in C++ and Triton compute this format, under these settings."""
        return number_format in BLOCK_FORMATS or (number_format == "affine" and not self.affine.per_product)

    @property
    def rounds_by_kernels(self) -> bool:
        """Whether kernels could round anything of a model."""
        return self.method not in ("float", "slu") and self.has_kernels(self.format)

    @property
    def dispatches(self) -> bool:
        """Whether blocks run only the samples that do not skip them."""
        skips = self.gated and self.gate_options[0].skips
        return self.run.left_out_from is not None and skips

    @property
    def may_use_codes(self) -> bool:
        """Whether ops may multiply on int8."""
        fits = self.format == "affine" and self.affine.ranges == "tensor" and self.affine.gradient_grid == "range"
        if not self.run.uses_codes or self.method == "float" or not fits:
            return False
        steered = self.gate_options if self.gated else self.precision_stages
        weights = [self.gate_weight_bits] if self.gated else [precision.fw for precision in steered]
        fits = min(weights) <= CODE_BITS and any(0 < precision.fw <= CODE_BITS for precision in steered)
        return fits or any(stage.fw <= CODE_BITS for pin in self.pins for stage in pin.stages)

    @property
    def windows(self) -> int | None:
        """How often the schedule is asked in a run, its end included; ``None`` if its length is not known."""
        length, every = self.run.length, self.schedule.every
        if every is None or length is None:
            return self.run.epochs
        return None if isinstance(length, int) else math.ceil(length.number / every.number)

    @property
    def gated(self) -> bool:
        """Whether gates choose precisions (``dfq``, ``fractrain``, ``slu``)."""
        return self.method in ("dfq", "fractrain", "slu")

    @property
    def scheduled(self) -> bool:
        """Whether the whole model has one precision at a time (``static``, ``pfq``)."""
        return self.method in ("static", "pfq")

    @property
    def schedules_rest(self) -> bool:
        """Whether ops that no gate can choose for follow the stage's target (``dfq``, ``fractrain``)."""
        return self.method in ("dfq", "fractrain")

    @property
    def gate_options(self) -> tuple[Precision, ...]:
        """The options of the gates under this method."""
        return (SKIP, FULL) if self.method == "slu" else self.options

    @property
    def projection_options(self) -> tuple[Precision, ...]:
        """``gate_options`` of an op on a skip path. It always runs, so the cheapest other option replaces 0/0."""
        computing = [option for option in self.gate_options if not option.skips]
        cheapest = min(computing, key=lambda option: (option.fw * option.bw, option.fw, option.bw))
        return tuple(cheapest if option.skips else option for option in self.gate_options)

    @property
    def gate_weight_bits(self) -> int:
        """Bits of gated weights under this method."""
        return FLOAT_BITS if self.method == "slu" else self.weight_bits

    @property
    def precision_stages(self) -> tuple[Precision, ...]:
        """The precisions of scheduled ops: those of ``static`` and ``pfq`` in order, or the gates' options by cost."""
        if self.gated:
            computing = [option for option in self.gate_options if not option.skips]
            return tuple(sorted(computing, key=lambda option: option.mean_share(self.gate_weight_bits)))
        return (self.precision,) if self.method == "static" else self.stages.stages

    def replace(self, **changes: Any) -> FracConfig:
        """A copy with some fields changed, validated again; an unknown field is an error that offers near names.

        The name of a field in a group has a dot: ``config.replace(**{"gate.beta": 1e-3})``.
        """
        return replace(self, **changed_fields(self, changes))

    @classmethod
    def paper(cls, method: str = "fractrain", **changes: Any) -> FracConfig:
        """The settings of a method as the paper prints them, with some fields changed.

        A target that the gates of a model cannot reach counts as the nearest one that they can.

        Raises:
            ConfigError: the method is unknown, or a value does not fit.
        """
        return cls.from_dict({"method": method, **paper_values(method)}).replace(**changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, for JSON and YAML."""
        return plain_values(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FracConfig:
        """Build from the result of ``to_dict``; an unknown key is an error that offers near names."""
        return cls(**given_fields(cls, values))

    def to_yaml(self, path: str | Path) -> None:
        """Write as YAML."""
        write_yaml(path, self.to_dict())

    @classmethod
    def from_yaml(cls, path: str | Path) -> FracConfig:
        """Read a file that ``to_yaml`` or a user wrote."""
        return cls.from_dict(read_yaml(path))
