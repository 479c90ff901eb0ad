"""Precision options (bits), PFQ's stages, and the cost targets of FracTrain's stages."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fractrain_fx.config.kinds import check_kinds, require_numbers, require_sequence
from fractrain_fx.errors import ConfigError

__all__ = [
    "AUTHORS_OPTIONS",
    "COMPACT_OPTIONS",
    "DFQ_OPTIONS",
    "FINE_OPTIONS",
    "FLOAT_BITS",
    "FULL",
    "SKIP",
    "CostTargets",
    "Precision",
    "PrecisionStages",
]

FLOAT_BITS = 32


@dataclass(frozen=True)
class Precision:
    """Bits of one precision option: ``fw`` for activations, ``bw`` for output gradients.

    Prints and parses as ``FW-3/BW-6``. ``FW-0/BW-0`` skips the block; 32 bits are float.

    Raises:
        ConfigError: bits other than 0, 2 to 16 and 32, or 0 bits in one direction only.
    """

    fw: int
    bw: int

    def __post_init__(self) -> None:
        for name, bits in (("fw", self.fw), ("bw", self.bw)):
            if isinstance(bits, bool) or not isinstance(bits, int) or not (0 <= bits <= 16 or bits == FLOAT_BITS):
                raise ConfigError(
                    f"{name}={bits!r} is not a bit width: write 2 to 16, 32 for float, or 0 for both to skip the block"
                )
        if (self.fw == 0) != (self.bw == 0):
            raise ConfigError(f"{self} skips one direction only: write FW-0/BW-0, or bits for both")
        if 1 in (self.fw, self.bw):
            raise ConfigError(f"{self} has one bit, which the affine formats cannot hold: write 2 or more")

    def __str__(self) -> str:
        return f"FW-{self.fw}/BW-{self.bw}"

    @classmethod
    def parse(cls, text: str | Precision) -> Precision:
        """Read ``FW-3/BW-6`` (or the short ``3/6``)."""
        if isinstance(text, Precision):
            return text
        match = re.fullmatch(r"\s*(?:FW-?)?(\d+)\s*/\s*(?:BW-?)?(\d+)\s*", str(text), flags=re.IGNORECASE)
        if match is None:
            raise ConfigError(f"{text!r} is not a precision: write FW-3/BW-6, or 3/6")
        return cls(int(match[1]), int(match[2]))

    def operands(
        self, weight_bits: int | None = None, least: tuple[int, int, int] = (0, 0, 0), *, by_product: bool = False
    ) -> tuple[tuple[int, int], ...]:
        """The bits of both operands of FW, EB and GC.

        These are activation and weight, gradient and weight, gradient and activation.

        Args:
            weight_bits: bits of a weight with bits of its own; by default the forward bits.
            least: fewest bits of the operands of each product; 0 bits, which skip it, stay.
            by_product: whether both operands of FW have the forward bits, and those of EB and GC the backward bits.
        """
        weight = self.fw if weight_bits is None else weight_bits
        products = ((self.fw, weight), (self.bw, weight), (self.bw, self.fw))
        if by_product:
            products = ((self.fw, self.fw), (self.bw, self.bw), (self.bw, self.bw))
        return tuple(
            (max(first, fewest) if first else 0, max(second, fewest) if second else 0)
            for (first, second), fewest in zip(products, least, strict=True)
        )

    def shares(
        self, weight_bits: int, least: tuple[int, int, int] = (0, 0, 0), *, by_product: bool = False
    ) -> tuple[float, float, float]:
        """The cost of FW, EB and GC, each as a share (0..1) of a 32 x 32 bit product (paper 4.1).

        With ``b`` forward, ``g`` backward and ``w`` weight bits it is ``b w``, ``g w`` and ``b g``, over 1,024.

        Args:
            weight_bits: bits of the weight.
            least: as for :meth:`operands`.
            by_product: the same; the products are then ``b b``, ``g g`` and ``g g``.
        """
        full = FLOAT_BITS * FLOAT_BITS
        fw, eb, gc = (a * b / full for a, b in self.operands(weight_bits, least, by_product=by_product))
        return fw, eb, gc

    def mean_share(self, weight_bits: int) -> float:
        """Training cost of an op with weights, as a share (0..1) of full precision (paper 4.1)."""
        return sum(self.shares(weight_bits)) / 3

    @property
    def skips(self) -> bool:
        return self.fw == 0

    @property
    def is_float(self) -> bool:
        return self.fw == FLOAT_BITS and self.bw == FLOAT_BITS


SKIP = Precision(0, 0)
FULL = Precision(FLOAT_BITS, FLOAT_BITS)

# Supplement 6: options of DFQ on ResNets, and on compact models (MobileNetV2).
DFQ_OPTIONS = tuple(Precision.parse(p) for p in ("0/0", "2/6", "3/6", "4/6", "4/12", "6/8", "6/12"))
COMPACT_OPTIONS = tuple(Precision.parse(p) for p in ("0/0", "4/8", "6/8", "6/10", "8/8"))

# Forward bits in steps of one, for higher targets than the paper's. Those that compute are the default
# (docs/background/gates.md).
FINE_OPTIONS = tuple(Precision.parse(p) for p in ("0/0", "3/6", "4/8", "5/8", "6/8", "7/8", "8/8"))

# The options in the authors' code for CIFAR. The paper does not print them. None of them skips a block.
AUTHORS_OPTIONS = tuple(Precision.parse(p) for p in ("3/6", "4/6", "4/8", "6/8", "6/12"))


@dataclass(frozen=True)
class PrecisionStages:
    """PFQ's stages in order (paper 3.1). Prints and parses as ``FW(5,6,7,8)/BW(8,8,8,8)``.

    Raises:
        ConfigError: there is no stage, or one of 0 bits.
    """

    stages: tuple[Precision, ...] = (Precision(5, 8), Precision(6, 8), Precision(7, 8), Precision(8, 8))

    def __post_init__(self) -> None:
        require_sequence("stages", self.stages, "(Precision(4, 6), Precision(8, 8))")
        object.__setattr__(self, "stages", tuple(Precision.parse(stage) for stage in self.stages))
        if not self.stages:
            raise ConfigError("PrecisionStages needs at least one stage, for example FW(5,6,7,8)/BW(8,8,8,8)")
        if any(stage.skips for stage in self.stages):
            raise ConfigError(f"{self} holds a stage of 0 bits: only DFQ's gates skip; write 2 bits or more")

    def __str__(self) -> str:
        fw, bw = (",".join(str(getattr(stage, side)) for stage in self.stages) for side in ("fw", "bw"))
        return f"FW({fw})/BW({bw})"

    @classmethod
    def parse(cls, text: str | PrecisionStages) -> PrecisionStages:
        """Read ``FW(5,6,7,8)/BW(8,8,8,8)``."""
        if isinstance(text, PrecisionStages):
            return text
        match = re.fullmatch(r"\s*FW\(([\d,\s]+)\)\s*/\s*BW\(([\d,\s]+)\)\s*", str(text), flags=re.IGNORECASE)
        if match is None:
            raise ConfigError(f"{text!r} is not a list of stages: write FW(5,6,7,8)/BW(8,8,8,8)")
        fw, bw = ([int(bits) for bits in group.split(",") if bits.strip()] for group in match.groups())
        if len(fw) != len(bw):
            raise ConfigError(f"{text!r} has {len(fw)} forward but {len(bw)} backward stages: give as many of each")
        return cls(tuple(Precision(f, b) for f, b in zip(fw, bw, strict=True)))


@dataclass(frozen=True)
class CostTargets:
    """FracTrain's target cp of each stage, in per cent of the full-precision training cost (paper 3.3).

    Attributes:
        per_cent: the targets.
        saturate: a target out of reach counts as the nearest one in reach instead of being an error.

    Raises:
        ConfigError: a target is not a number above 0 and at most 100.
    """

    per_cent: tuple[float, ...] = (2.9, 3.4, 3.6, 3.8)
    saturate: bool = False

    def __post_init__(self) -> None:
        check_kinds(self, "targets.")
        require_numbers("targets", self.per_cent, "[2.9, 3.4, 3.6, 3.8]")
        object.__setattr__(self, "per_cent", tuple(float(target) for target in self.per_cent))
        if not self.per_cent or not all(0 < target <= 100 for target in self.per_cent):
            raise ConfigError(
                f"targets {self.per_cent} must be shares in per cent, above 0 and at most 100, e.g. 2.9 3.4 3.6 3.8"
            )
