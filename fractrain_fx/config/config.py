"""What a user can set: frozen, validated, and equal to ALGORITHM's defaults (paper, supplement 4 to 7)."""

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
    Method,
    Mixing,
    Rounding,
    Saved,
    Schedule,
    Skipping,
    Torchao,
)
from fractrain_fx.config.parts import GateConfig, Pin
from fractrain_fx.config.plain import given_fields, plain_values, read_yaml, write_yaml
from fractrain_fx.config.precision import (
    DFQ_OPTIONS,
    FLOAT_BITS,
    FULL,
    SKIP,
    CostTargets,
    Precision,
    PrecisionStages,
)

__all__ = ["FracConfig"]


@dataclass(frozen=True)
class FracConfig:
    """Everything that turns a model into one trained with fractional precision.

    Attributes:
        method: ``float``, ``static``, ``pfq``, ``dfq``, ``fractrain`` or ``slu``.
        format: the number format: ``affine`` is SBM's (ALGORITHM 2); ``dorefa`` and ``wageubn``.
        precision: the precision of ``static``.
        stages: the precisions of ``pfq``.
        options: what the gates of ``dfq`` and ``fractrain`` choose from; ``slu`` has 0/0 and 32/32.
        weight_bits: bits of gated weights.
        targets: cp of each stage of ``fractrain``; ``dfq`` and ``slu`` hold the last one. ``None``: the paper's
            1.5/2/2.5/3, moved up for a model whose blocks cannot all be skipped until the lowest can be reached
            (3 per cent for ``dfq``; 50 per cent for ``slu``).
        saturate_targets: whether a target out of reach counts as the nearest cp that the gates can choose, as in the
            authors' code; without it such a target is an error.
        mixing: ``inputs``: each op runs once, every sample's operands rounded at its own option. ``outputs``: each
            gated block runs once for every option and the results are mixed, as in the original code; slow, to compare.
        saved: what quantized ops keep of activations between forward and backward. ``operands``: the activation as it
            came, to be rounded again. ``rounded``: the rounded copy; quicker, more memory. ``codes``: one byte a value,
            less memory where nothing else holds the activation (``static`` and ``pfq`` at up to 8 forward bits).
        attention: ``quantized``: fused attention (``scaled_dot_product_attention``) is opened into its two products,
            which get precisions like all others. ``float``: it stays one fused call in float, as where only linear
            layers count (the paper's Transformer); quicker, at a higher ``cp_total``.
        rounding: how a CPU rounds, and finds ranges and the gradient of gates. ``eager``: by plain operations of torch.
            ``compiled``: each in one pass, by C++ kernels that are built at their first use (half a minute, kept on
            disk; needs a C++ compiler and ninja), for format ``affine``. With ``execution="auto"`` they also multiply
            whole codes, on a CPU with AVX2 or AVX-512. Graphs that ``torch.compile`` made leave the gradient of gates
            and the codes to them; what rounds there is code of the compiler's.
        execution: ``simulate``: every block runs for all samples, and the result of those that skip it is dropped.
            ``auto``: they are left out where that saves time. All numbers are the same but these: batch norm and ranges
            inside a block see the samples that run, and a sample that skips a block has no gradient through what the
            block would have given it (docs/execution.md). ``torchao-int8``, ``torchao-float8``: torchao's training in
            8 bits computes linear layers, in numbers of its own (``static`` at FW-8/BW-8).
        skipping: ``dispatched``: ``execution="auto"`` leaves samples that skip out; ``masked``: it does not, for models
            whose batch norm has to see all samples.
        skip_threshold: share (0..1) of a batch that has to skip a block for them to be left out; ``None``: the one
            measured to pay.
        kernels: how ``execution="auto"`` multiplies what format ``affine`` rounds to at most 8 bits; the numbers are
            the same. ``auto``: on int8 where a short timing, for each shape and, for C++ kernels, each width as it
            first trains, finds that quicker than float; ``int8``: wherever it can be; ``float``: never.
        gradient_grid: where the levels of rounded output gradients lie in format ``affine``. ``range``: from the lowest
            value on. ``zero``: shifted by less than a level, so that one of them is 0 and zero gradients stay zero.
        pins: rules that fix the precision of some contractions.
        gate: sizes and strength of the gates.
        schedule: what moves the stage: ``auto`` is Algorithm 1.
        indicator: the loss whose course moves the stages of ``auto`` and ``two-stage``. ``task``: that of the task.
            ``total``: the same plus the cost term, as in the authors' code (``fractrain``).
        epochs: length of the run; needed by the ``manual`` and ``cyclic`` schedules.
        cycles: cosine cycles of the ``cyclic`` schedule.
        epsilon, alpha: threshold of the turning point and its decay (Algorithm 1).
        keep: share of the old running range that a training step keeps.
        batch_axis: dimension of the model's inputs that holds the samples.
        recordings: how often one model is recorded at most, for sizes with which its code takes other ways.
    """

    method: Method = "fractrain"
    format: str = "affine"
    precision: Precision = Precision(8, 8)
    stages: PrecisionStages = field(default_factory=PrecisionStages)
    options: tuple[Precision, ...] = DFQ_OPTIONS
    weight_bits: int = 6
    targets: CostTargets | None = None
    saturate_targets: bool = False
    mixing: Mixing = "inputs"
    saved: Saved = "operands"
    attention: Attention = "quantized"
    rounding: Rounding = "eager"
    execution: Execution = "simulate"
    skipping: Skipping = "dispatched"
    skip_threshold: float | None = None
    kernels: Kernels = "auto"
    gradient_grid: GradientGrid = "range"
    pins: tuple[Pin, ...] = ()
    gate: GateConfig = field(default_factory=GateConfig)
    schedule: Schedule = "auto"
    indicator: Indicator = "task"
    epochs: int | None = None
    cycles: int = 8
    epsilon: float = 0.05
    alpha: float = 0.3
    keep: float = 0.9
    batch_axis: int = 0
    recordings: int = 8

    def __post_init__(self) -> None:
        check_words(self)
        self._normalise()
        check_config(self)

    def _normalise(self) -> None:
        set_field = object.__setattr__
        set_field(self, "precision", Precision.parse(self.precision))
        set_field(self, "stages", PrecisionStages.parse(self.stages))
        set_field(self, "options", tuple(Precision.parse(option) for option in self.options))
        set_field(self, "pins", tuple(self.pins))
        if self.targets is not None and not isinstance(self.targets, CostTargets):
            set_field(self, "targets", CostTargets(tuple(self.targets)))

    @property
    def dispatches(self) -> bool:
        """Whether blocks run only the samples that do not skip them."""
        skips = self.gated and self.gate_options[0].skips
        return self.execution == "auto" and self.skipping == "dispatched" and skips

    @property
    def lowers(self) -> bool:
        """Whether ops may multiply on int8."""
        if self.execution != "auto" or self.kernels == "float" or self.format != "affine" or self.method == "float":
            return False
        steered = self.gate_options if self.gated else self.precision_stages
        weights = [self.gate_weight_bits] if self.gated else [each.fw for each in steered]
        pinned = [pin.precision.fw for pin in self.pins]
        fits = min(weights) <= CODE_BITS and any(0 < each.fw <= CODE_BITS for each in steered)
        return fits or any(fw <= CODE_BITS for fw in pinned)

    @property
    def torchao(self) -> Torchao | None:
        """What torchao computes linear layers in, where it does."""
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
        """Whether one precision at a time holds for the whole model (``static``, ``pfq``)."""
        return self.method in ("static", "pfq")

    @property
    def gate_options(self) -> tuple[Precision, ...]:
        """What the gates choose from under this method."""
        return (SKIP, FULL) if self.method == "slu" else self.options

    @property
    def projection_options(self) -> tuple[Precision, ...]:
        """``gate_options`` of an op on a skip path, which runs for samples that skip too: 0/0 is the cheapest other."""
        computing = [option for option in self.gate_options if not option.skips]
        cheapest = min(computing, key=lambda option: (option.fw * option.bw, option.fw, option.bw))
        return tuple(cheapest if option.skips else option for option in self.gate_options)

    @property
    def gate_weight_bits(self) -> int:
        """Bits of gated weights under this method."""
        return FLOAT_BITS if self.method == "slu" else self.weight_bits

    @property
    def precision_stages(self) -> tuple[Precision, ...]:
        """The precisions that ``static`` and ``pfq`` move through, in order."""
        return (self.precision,) if self.method == "static" else self.stages.stages

    def replace(self, **changes: Any) -> FracConfig:
        """A copy with some fields changed, validated again."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only: what JSON and YAML hold."""
        return plain_values(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FracConfig:
        """Build from what ``to_dict`` gives; unknown keys are errors that offer near names."""
        return cls(**given_fields(cls, values))

    def to_yaml(self, path: str | Path) -> None:
        """Write as YAML."""
        write_yaml(path, self.to_dict())

    @classmethod
    def from_yaml(cls, path: str | Path) -> FracConfig:
        """Read what ``to_yaml`` wrote, or a file a user wrote by hand."""
        return cls.from_dict(read_yaml(path))
