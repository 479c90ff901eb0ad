"""BitFusion as a machine that prices training steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fractrain_fx.config.precision import Precision
from fractrain_fx.errors import ConfigError
from fractrain_fx.hardware.bitfusion import ConvolutionRun, training_step
from fractrain_fx.hardware.machine import (
    CODE_FORMATS,
    PATHS,
    Bound,
    Choice,
    Choices,
    Price,
    StepCost,
    Traffic,
    Work,
    sum_step,
)

__all__ = ["BitFusion"]

_WIDTHS = frozenset({0, 2, 4, 8})  # the array holds 3 bits in 4, and 5 to 7 in 8


class BitFusion:
    """The accelerator that the paper simulates (docs/background/bitfusion.md): contractions alone, with dynamic energy.

    Floats count as integers of 32 bits. Ops rounded to formats without integer codes have no price.
    """

    name = "bitfusion"

    def supports(self, precision: Precision, format: str = "affine") -> bool:
        return format in CODE_FORMATS and {precision.fw, precision.bw} <= _WIDTHS

    def step(self, ops: Sequence[Work], choices: Choices, *, batch: int = 1) -> StepCost:
        return sum_step(_price, ops, choices, batch)


def _price(op: Work, choice: Choice, batch: int) -> Mapping[str, Price] | None:
    if isinstance(op, Traffic) or op.product is None or not choice.has_codes:
        return None
    product = op.product
    # Samples that share the weight are rows of one convolution. Otherwise each has its own convolution.
    together, alone = (batch, 1) if product.shared else (1, batch)
    activation, weight = choice.bits("FW")
    try:
        step = training_step(
            product.kernel,
            product.output,
            product.stride,
            product.inputs,
            product.outputs,
            product.rows * together,
            a_bits=activation,
            w_bits=weight,
            g_bits=choice.precision.bw,
            I=product.input,
        )
    except ConfigError:  # no tile of it fits the SRAMs
        return None
    runs = zip(PATHS, (step.fw, step.eb, step.gc), op.training_macs, strict=True)
    return {path: _part(run, product.repeats * alone) for path, run, macs in runs if run is not None and macs}


def _part(run: ConvolutionRun, times: int) -> Price:
    bound: Bound = "memory" if 2 * run.waiting > run.cycles else "compute"
    return Price(times * run.seconds, times * run.energy_nj / 1e9, bound)
