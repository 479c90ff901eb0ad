"""A machine as two numbers for each type: how much it computes and how much it moves in a second (a roofline).

A product takes the longer of its arithmetic and its traffic, or their sum on a processor, whose cores do both; each
operand is read once, and the result written once. Rounding comes on top as traffic of its own, because a range must be
known before the first value is rounded:

- ``affine``, ``dorefa``, ``wageubn``, ``fp8``: a value is read for the range, read again, and written as a code.
- ``mx``, ``nvfp4``: read once, since a range is that of a block, and written with the scales of the blocks.
- Weights are kept in float32 and cast to 16 bits once a step if the other values have 16 bits.
- An operand is rounded once a step, and written again only where another product needs a wider type of it.

Calls whose products have no known sizes (fused attention) are priced by their arithmetic alone. Launches of kernels,
caches, the network and the optimizer are not priced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fractrain_fx.config.precision import FLOAT_BITS, Precision
from fractrain_fx.errors import ConfigError
from fractrain_fx.hardware.machine import (
    BLOCK_SIZES,
    CODE_FORMATS,
    PATHS,
    Bound,
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
from fractrain_fx.passes import Op

__all__ = ["TYPES", "Roofline", "Source"]

TYPES = {
    "float32": 4.0,
    "tf32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "mxfp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
    "mxfp4": 0.5,
    "nvfp4": 0.5,
}
"""Number types, and the bytes of a value."""

# Types that hold all values of a format, from narrow to wide, with the bits that each holds exactly.
_LADDERS: dict[str, tuple[tuple[str, int], ...]] = {
    "codes": (("int4", 4), ("int8", 8), ("bfloat16", 8), ("float16", 11), ("tf32", 11), ("float32", 24)),
    "fp8": (("fp8", 8), ("bfloat16", 16), ("float32", FLOAT_BITS)),
    "mx": (("mxfp4", 4), ("mxfp8", 8), ("bfloat16", 16), ("float32", FLOAT_BITS)),
    "nvfp4": (("nvfp4", 4), ("bfloat16", 16), ("float32", FLOAT_BITS)),
    "int": (("int4", 4), ("int8", 8), ("bfloat16", 16), ("float32", FLOAT_BITS)),
}
_OPERANDS: dict[Path, tuple[str, str]] = {"FW": ("x", "w"), "EB": ("g", "w"), "GC": ("g", "x")}


@dataclass(frozen=True)
class Source:
    """Where figures come from: the title of a document, and what was taken from it."""

    title: str
    figures: str


@dataclass(frozen=True)
class Roofline:
    """One accelerator, or one processor.

    Attributes:
        name: short name for the command line.
        title: the product.
        peak: operations a second of dense products by type, accumulated in 32 bits; a product is two operations.
        bandwidth: bytes a second of its memory.
        watts: the board's power; energy is this times the time, an upper bound. ``None`` if no figure is public.
        computes: share (0..1) of ``peak`` that large products reach.
        streams: share (0..1) of ``bandwidth`` that passes over large tensors reach.
        sources: documents that the figures come from.
        convolution: operations a second of convolutions by type, where these are not those of ``peak``.
        overlaps: whether a product's traffic goes on beside its arithmetic; if not, their times add up.
        convolution_passes: how often convolutions of the types in ``convolution`` move each operand and the result: 3
            if their library reads and writes it once more, in an order of its own.

    Raises:
        ConfigError: ``peak`` or ``convolution`` has an unknown type, or ``peak`` lacks ``float32``.
    """

    name: str
    title: str
    peak: Mapping[str, float]
    bandwidth: float
    watts: float | None = None
    computes: float = 1.0
    streams: float = 1.0
    sources: tuple[Source, ...] = field(default=(), repr=False)
    convolution: Mapping[str, float] = field(default_factory=dict)
    overlaps: bool = True
    convolution_passes: int = 1

    def __post_init__(self) -> None:
        unknown = {*self.peak, *self.convolution} - set(TYPES)
        if unknown:
            raise ConfigError(f"{self.name}: {', '.join(sorted(unknown))} are not number types: {', '.join(TYPES)}")
        if "float32" not in self.peak:
            raise ConfigError(f"{self.name}: give the peak of float32, to which everything else falls back")

    def supports(self, precision: Precision, format: str = "affine") -> bool:
        if precision.skips:
            return True
        bits = {precision.fw, precision.bw}
        return all(width == _width(self.type_of(width, format), format) for width in bits)

    def type_of(self, bits: int, format: str, floats: str = "float32") -> str:
        """The type in which the machine multiplies values of a format: the narrowest that it has and that holds them.

        Raises:
            ConfigError: the format is unknown.
        """
        if bits == FLOAT_BITS:
            return floats if floats in self.peak else "float32"
        ladder = _LADDERS.get("codes" if format in CODE_FORMATS else format)
        if ladder is None:
            known = ", ".join(sorted(CODE_FORMATS | (set(_LADDERS) - {"codes"})))
            raise ConfigError(f"format={format!r} is not known to a roofline: write one of {known}")
        return next((name for name, held in ladder if held >= bits and name in self.peak), "float32")

    def step(self, ops: Sequence[Work], choices: Choices, *, batch: int = 1) -> StepCost:
        return sum_step(self._price, ops, choices, batch)

    def _price(self, op: Work, choice: Choice, batch: int) -> Mapping[str, Price] | None:
        if isinstance(op, Traffic):
            floats = self.type_of(FLOAT_BITS, choice.format, choice.floats)
            return {"all": self._priced(0.0, op.values * batch * TYPES[floats], 0.0)}
        if op.macs is None:
            return None
        # A fused call without known sizes is priced by its arithmetic alone.
        values = Values(0, 0, 0) if op.product is None else Values.of(op.product, batch)
        return self._products(op, choice, batch, values)

    def _products(self, op: Op, choice: Choice, batch: int, values: Values) -> dict[str, Price]:
        sizes = dict(zip("xwg", values, strict=True))
        result = self.type_of(FLOAT_BITS, choice.format, choice.floats)
        x, w = choice.bits("FW")
        lie = {"x": (x, _stored(result)), "w": (w, "float32"), "g": (choice.precision.bw, _stored(result))}
        copies = {(operand, kind) for operand, (width, kind) in lie.items() if width == FLOAT_BITS}
        ranged: set[str] = set()
        parts: dict[str, Price] = {}
        for path, macs in zip(PATHS, op.training_macs, strict=True):
            if not macs:
                continue
            bits, format = choice.bits(path), choice.format_of(path)
            kind = self._wider(bits, format, result)
            rounding = 0.0
            for operand, width in zip(_OPERANDS[path], bits, strict=True):
                if (operand, _stored(kind)) not in copies:
                    held = TYPES["float32" if operand == "w" else result]
                    reads = 1 if operand in ranged else _reads(width, format)
                    rounding += sizes[operand] * (reads * held + _written(kind, format))
                    copies.add((operand, _stored(kind)))
                    ranged.add(operand)
            operands = sum(sizes[operand] for operand in _OPERANDS[path]) * _written(kind, format)
            out = values.moved(path)[2] * TYPES["float32" if path == "GC" else result]
            convolves = op.kind == "conv" and kind in self.convolution
            peak = self.convolution[kind] if convolves else self.peak[kind]
            moved = (operands + out) * (self.convolution_passes if convolves else 1)
            parts[path] = self._priced(2 * macs * batch / peak, moved, rounding)
        return parts

    def _wider(self, bits: tuple[int, int], format: str, floats: str) -> str:
        """The type in which both operands of a product run."""
        return max((self.type_of(width, format, floats) for width in sorted(bits)[::-1]), key=TYPES.__getitem__)

    def _priced(self, compute: float, moved: float, rounding: float) -> Price:
        speed = self.bandwidth * self.streams
        product, rounded = (compute / self.computes, moved / speed), rounding / speed
        seconds = (max(product) if self.overlaps else sum(product)) + rounded
        bound: Bound = "rounding" if rounded > max(product) else "compute" if product[0] >= product[1] else "memory"
        return Price(seconds, None if self.watts is None else self.watts * seconds, bound)


def _width(kind: str, format: str) -> int:
    """The bits of a type's values; of floats that hold codes, none."""
    if kind == "float32":
        return FLOAT_BITS
    return 0 if format in CODE_FORMATS and not kind.startswith("int") else int(8 * TYPES[kind])


def _stored(kind: str) -> str:
    """The type in which values of a type lie in memory: units round float32 to tf32 as they read it."""
    return "float32" if kind == "tf32" else kind


def _reads(bits: int, format: str) -> int:
    """How often a value is read to round it to so many bits."""
    return 1 if bits == FLOAT_BITS or format in BLOCK_SIZES else 2


def _written(kind: str, format: str) -> float:
    """Bytes of a value of a type, with its share of its block's scale of one byte."""
    narrow = kind in ("mxfp8", "mxfp4", "nvfp4")
    return TYPES[kind] + (1 / BLOCK_SIZES[format] if narrow else 0.0)
