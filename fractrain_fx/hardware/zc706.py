"""The FPGA board of the paper's edge experiment: Xilinx ZC706, one array of multipliers that every precision reuses.

The paper (section 4.6) says: the design follows EDD (Li et al., DAC 2020), a recursive architecture for networks of
mixed precision, in which the same unit computes at every precision; the board is a ZC706. It prints the savings alone.
The rest is assumed here, and docs/reference/machines.md says why:

- The array has 900 DSP slices (XC7Z045: Xilinx DS190), 200 MHz, and two products of up to 8 bits a slice and cycle.
- The array is as wide as its ports at 8 bits. Operands of fewer bits arrive sooner, so a product takes time in
  proportion to the bits of both operands together.
- An operand above 16 bits is cut into equally wide digits, and the layer runs once for each pair.
- Tensors lie in the DDR3 memory beside the logic (64 bits at 1,600 MT/s) at their own bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fractrain_fx.config.precision import FLOAT_BITS, Precision
from fractrain_fx.hardware.machine import (
    CODE_FORMATS,
    PATHS,
    Choice,
    Choices,
    Path,
    Price,
    StepCost,
    Traffic,
    Values,
    Work,
    sum_step,
)

__all__ = ["ZC706"]

SLICES = 900
FREQUENCY = 200e6  # Hz
PRODUCTS = 2  # of 8 bits, in a slice and cycle
NATIVE_BITS = 8
WIDEST_BITS = 16  # of one pass
DRAM = 12.8e9  # bytes a second


class ZC706:
    """Time of training steps on the board; the paper prints savings of energy, but no power to compute joules from.

    Ops rounded to formats without integer codes have no price.
    """

    name = "zc706"

    def supports(self, precision: Precision, format: str = "affine") -> bool:
        return format in CODE_FORMATS and max(precision.fw, precision.bw) <= WIDEST_BITS

    def step(self, ops: Sequence[Work], choices: Choices, *, batch: int = 1) -> StepCost:
        return sum_step(_price, ops, choices, batch)


def _price(op: Work, choice: Choice, batch: int) -> Mapping[str, Price] | None:
    if isinstance(op, Traffic) or op.product is None or not choice.has_codes:
        return None
    values = Values.of(op.product, batch)
    parts = zip(PATHS, op.training_macs, strict=True)
    return {path: _part(path, macs * batch, values, choice) for path, macs in parts if macs}


def _part(path: Path, macs: int, values: Values, choice: Choice) -> Price:
    bits = choice.bits(path)
    digits = [-(-b // WIDEST_BITS) for b in bits]
    width = sum(b / count for b, count in zip(bits, digits, strict=True))
    products = macs * digits[0] * digits[1] * width / (2 * NATIVE_BITS)
    compute = products / (SLICES * PRODUCTS * FREQUENCY)
    # Activations and errors are written as the next layer reads them, and weight gradients as they are summed.
    written = {"FW": choice.precision.fw, "EB": choice.precision.bw, "GC": FLOAT_BITS}[path]
    moved = sum(count * b for count, b in zip(values.moved(path), (*bits, written), strict=True))
    memory = moved / 8 / DRAM
    return Price(max(compute, memory), None, "compute" if compute >= memory else "memory")
