"""FracConfig: frozen, validated, with the paper's defaults (supplement 4 to 7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast, get_args

from fractrain_fx.config.checks import check_config, check_words
from fractrain_fx.config.choices import (
    CODE_BITS,
    DISPATCH_FROM,
    Attention,
    Execution,
    GradientGrid,
    Indicator,
    Kernels,
    MemoryFormat,
    Method,
    Ranges,
    Rounding,
    Schedule,
    Skipping,
    Torchao,
)
from fractrain_fx.config.clock import Amount, parse_amount, parse_turn
from fractrain_fx.config.gate import GateConfig
from fractrain_fx.config.kinds import check_kinds, require_sequence
from fractrain_fx.config.pins import Pin, parse_pins
from fractrain_fx.config.plain import given_fields, known_keys, plain_values, read_yaml, write_yaml
from fractrain_fx.config.precision import (
    DFQ_OPTIONS,
    FLOAT_BITS,
    FULL,
    SKIP,
    CostTargets,
    Precision,
    PrecisionStages,
)
from fractrain_fx.config.products import BLOCK_FORMATS, Recipe
from fractrain_fx.config.recipes import recipe_of, usual_recipe

__all__ = ["FracConfig"]


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
        targets: cp of each stage of ``fractrain``; ``dfq`` and ``slu`` hold the last one. ``None``: the paper's
            1.5/2/2.5/3 (3 for ``dfq``, 50 for ``slu``; in per cent), moved into reach of the model's gates.
        saturate_targets: whether a target out of reach counts as the nearest one in reach instead of being an error.
        attention: ``quantized``: fused attention is opened into its two products, which get precisions like all others.
            ``float``: it stays one call in float; quicker, at a higher ``cp_total``. The paper's Transformer has it.
        rounding: what rounds, finds ranges, and computes gates and their gradient. ``eager``: plain torch operations.
            ``triton``: on a GPU Triton kernels, for format ``affine``; elsewhere as ``eager``. ``compiled``: on a GPU
            as ``triton``; on a CPU C++ kernels, for ``affine`` and block formats, built at their first use. With
            ``execution="auto"`` they also multiply codes, on a CPU with AVX2 or AVX-512. ``auto``: ``compiled`` on a
            CPU where they were built before, else ``triton`` where Triton is installed, else ``eager``; ``fractrain
            train`` builds them for a long run (docs/execution.md).
        execution: ``simulate``: every block runs for all samples, and its result is dropped for samples that skip it.
            ``auto``: samples that skip are left out if that saves time. Values stay the same, except that batch norm
            and ranges inside a block only see the samples that run, noise is drawn for these alone, and a sample that
            skips a block has no gradient through it (docs/execution.md). ``torchao-int8``, ``torchao-float8``,
            ``torchao-mxfp8``: torchao's 8-bit training computes linear layers (``static`` at FW-8/BW-8): under
            ``affine`` in its own numbers, under ``fp8`` and ``mx`` by ``fp8`` and ``mxfp8`` (docs/torchao.md).
        skipping: ``dispatched``: ``execution="auto"`` leaves out samples that skip. ``masked``: it does not, for models
            whose batch norm must see all samples.
        skip_threshold: share (0..1) of a batch that must skip a block before they are left out; ``None``: as measured.
        kernels: how ``execution="auto"`` multiplies values that format ``affine`` rounds to at most 8 bits; the results
            are the same. ``auto``: on int8 if a short timing finds that quicker than float. Each shape, and each width
            with C++ kernels, is timed as it first trains. ``int8``: wherever possible. ``float``: never on int8.
        memory_format: ``auto``: on a CPU, convolutions of images and the layers between them compute in
            ``torch.channels_last``, which is quicker. ``preserve``: in the order of inputs and weights.
        gradient_grid: the levels of rounded output gradients in format ``affine``. ``range``: from the lowest value on.
            ``zero``: shifted by less than a level, so that one level is 0 and zero gradients stay zero.
        ranges: what shares a range in format ``affine``. ``tensor``: an activation or gradient, and each output channel
            of a weight. ``row``: what a product sums over, so that each product rounds its operands anew. ``head``: as
            ``tensor``, but with one range for each index that no product sums over: sample and head in the products of
            attention. ``row`` and ``head`` measure in evaluation too.
        pins: rules that fix the precision of some contractions, and maybe their number format (:class:`Pin`).
        gate: sizes and strength of the gates.
        schedule: moves the run from stage to stage. ``None``: as ``auto`` in runs of unknown length and of twice the
            losses that it needs at least (30 epochs for four stages); in shorter ones each stage gets the same time.
            ``auto``: Algorithm 1. ``two-stage``: the same over the first and the last stage. ``manual``: each stage
            gets the same time. ``cyclic``: cosine cycles from the first to the last. ``fixed``: stages begin at
            ``turns``. ``constant``: the last stage only.
        every: how often the schedule is asked for the stage: ``Steps(100)`` (``100 steps``) or ``Tokens(1_000_000)``;
            ``None``: after each epoch. It then gets the mean loss since it was last asked.
        turns: where each stage after the first begins, for ``fixed``: shares of the run (``0.75``), or ``Steps`` or
            ``Tokens``, as ``every`` counts. A stage begins when the schedule is next asked.
        length: length of the run in the unit of ``every``. ``fractrain train`` sets it; Hugging Face's and Lightning's
            trainers know it, unless the unit is tokens.
        indicator: the loss that moves the stages of ``auto`` and ``two-stage``. ``task``: the task loss. ``total``: the
            task loss plus the cost term, as in the authors' code (``fractrain``).
        epochs: length of the run where ``every`` is ``None``.
        cycles: cosine cycles of the ``cyclic`` schedule.
        epsilon, alpha: threshold of the turning point and its decay (Algorithm 1).
        keep: share (0..1) of the old running range that a training step keeps.
        batch_axis: dimension of the model's inputs that holds the samples.
        compared_calls: of each recording, the number of first calls with other sizes that are compared with the model
            itself, because code may read a size in a way that recording does not see. The first call with another type,
            layout or setting of torch is always compared; 0 compares no call.
        recordings: most recordings of one model, for calls with other arguments and sizes that take another path.
    """

    method: Method = "fractrain"
    format: str = "affine"
    recipe: str | Recipe | None = None
    precision: Precision = Precision(8, 8)
    stages: PrecisionStages = field(default_factory=PrecisionStages)
    options: tuple[Precision, ...] = DFQ_OPTIONS
    weight_bits: int = 6
    targets: CostTargets | None = None
    saturate_targets: bool = False
    attention: Attention = "quantized"
    rounding: Rounding = "auto"
    execution: Execution = "simulate"
    skipping: Skipping = "dispatched"
    skip_threshold: float | None = None
    kernels: Kernels = "auto"
    memory_format: MemoryFormat = "auto"
    gradient_grid: GradientGrid = "range"
    ranges: Ranges = "tensor"
    pins: tuple[Pin, ...] = ()
    gate: GateConfig = field(default_factory=GateConfig)
    schedule: Schedule | None = None
    every: Amount | None = None
    turns: tuple[float | Amount, ...] = ()
    length: Amount | None = None
    indicator: Indicator = "task"
    epochs: int | None = None
    cycles: int = 8
    epsilon: float = 0.05
    alpha: float = 0.3
    keep: float = 0.9
    batch_axis: int = 0
    recordings: int = 8
    compared_calls: int = 16

    def __post_init__(self) -> None:
        check_words(self)
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
        for name in ("every", "length"):
            if (amount := getattr(self, name)) is not None:
                set_field(self, name, parse_amount(name, amount))
        require_sequence("turns", self.turns, "[0.75]")
        set_field(self, "turns", tuple(parse_turn(turn) for turn in self.turns))
        if self.targets is not None and not isinstance(self.targets, CostTargets):
            require_sequence("targets", self.targets, "[1.5, 2.0, 2.5, 3.0]")
            set_field(self, "targets", CostTargets(tuple(self.targets)))

    @property
    def product_recipe(self) -> Recipe | None:
        """The recipe of a block format, by name or as given; ``None`` for other formats."""
        if self.format not in BLOCK_FORMATS:
            return None
        if self.recipe is not None:
            return recipe_of(self.recipe)
        narrow = self.scheduled and any(each.bw < CODE_BITS for each in self.precision_stages)
        return usual_recipe(self.format, narrow=narrow)

    @property
    def per_product(self) -> bool:
        """Whether each product rounds its operands anew."""
        return self.product_recipe is not None or self.ranges != "tensor"

    @property
    def least_bits(self) -> tuple[int, int, int]:
        """Fewest bits of the operands of FW, EB and GC, which a recipe may ask for; 0: the stage's bits."""
        return (0, 0, 0) if self.product_recipe is None else self.product_recipe.least

    @property
    def dispatches(self) -> bool:
        """Whether blocks run only the samples that do not skip them."""
        skips = self.gated and self.gate_options[0].skips
        return self.execution == "auto" and self.skipping == "dispatched" and skips

    @property
    def may_use_codes(self) -> bool:
        """Whether ops may multiply on int8."""
        if self.execution != "auto" or self.kernels == "float" or self.method == "float":
            return False
        if self.format != "affine" or self.per_product:
            return False
        steered = self.gate_options if self.gated else self.precision_stages
        weights = [self.gate_weight_bits] if self.gated else [each.fw for each in steered]
        fits = min(weights) <= CODE_BITS and any(0 < each.fw <= CODE_BITS for each in steered)
        return fits or any(pin.precision.fw <= CODE_BITS for pin in self.pins)

    @property
    def torchao(self) -> Torchao | None:
        """The kind of torchao training that computes linear layers, or ``None``."""
        return cast(Torchao, self.execution) if self.execution in get_args(Torchao) else None

    @property
    def dispatch_from(self) -> float:
        """The share of skipped samples from which they are left out."""
        return DISPATCH_FROM if self.skip_threshold is None else self.skip_threshold

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
        """A copy with some fields changed, validated again; an unknown field is an error that offers near names."""
        known_keys(type(self), changes)
        return replace(self, **changes)

    @classmethod
    def paper(cls, method: str = "fractrain", **changes: Any) -> FracConfig:
        """The settings of a method as the paper prints them, with some fields changed."""
        from fractrain_fx.config.named import paper_values

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
