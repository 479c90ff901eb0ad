"""What a machine model answers: how long a training step takes, with what energy, and what bounds each op."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from fractrain_fx.config.precision import FULL, Precision
from fractrain_fx.errors import ConfigError
from fractrain_fx.passes import Op, Product

__all__ = [
    "BLOCK_SIZES",
    "CODE_FORMATS",
    "PATHS",
    "Bound",
    "Choice",
    "Choices",
    "Floats",
    "Machine",
    "OpStep",
    "Path",
    "Price",
    "StepCost",
    "Traffic",
    "Values",
    "Work",
    "sum_step",
]

Path = Literal["FW", "EB", "GC"]
PATHS: tuple[Path, ...] = ("FW", "EB", "GC")

Bound = Literal["compute", "memory", "rounding"]
Floats = Literal["float32", "tf32", "bfloat16", "float16"]

CODE_FORMATS = frozenset({"affine", "dorefa", "wageubn"})
"""Formats whose products are products of integer codes."""

BLOCK_SIZES = {"mx": 32, "nvfp4": 16}
"""Formats with one scale for each block of values, and the size of a block."""


@dataclass(frozen=True)
class Choice:
    """How some samples of a batch train an op.

    Attributes:
        precision: forward and backward bits; 32 are float.
        weight_bits: bits of the weight; ``None`` takes the forward bits, as products of two activations do.
        format: the number format of rounded operands, as in ``FracConfig.format``.
        floats: the type of results, of operands that are not rounded, and of values before they are rounded.
        share: share (0..1) of the samples.
        least: fewest bits of the operands of FW, EB and GC.
        by_product: whether both operands of a product have its bits (``Recipe.by_product``).
        formats: the number formats of FW, EB and GC, if they are not all ``format``.
    """

    precision: Precision = FULL
    weight_bits: int | None = None
    format: str = "affine"
    floats: Floats = "float32"
    share: float = 1.0
    least: tuple[int, int, int] = (0, 0, 0)
    by_product: bool = False
    formats: tuple[str, str, str] | None = None

    def format_of(self, path: Path) -> str:
        """The number format of a product's operands."""
        return self.format if self.formats is None else self.formats[PATHS.index(path)]

    @property
    def has_codes(self) -> bool:
        """Whether the operands of all three products are integer codes; floats count as codes of 32 bits."""
        return self.precision == FULL or all(self.format_of(path) in CODE_FORMATS for path in PATHS)

    def bits(self, path: Path) -> tuple[int, int]:
        """The bits of a product's two operands: activation and weight, gradient and weight, gradient and activation."""
        operands = self.precision.operands(self.weight_bits, self.least, by_product=self.by_product)
        return operands[PATHS.index(path)]


Choices = Mapping[str, Sequence[Choice]]
"""For each op by name, the choices of its samples. Their shares sum to 1, or to less if some samples skip the op."""


@dataclass(frozen=True)
class Traffic:
    """Work beside the contractions, such as a norm, an activation function or a residual sum.

    Attributes:
        name: name of the node.
        values: values that it reads and writes for one sample, forward and backward.
    """

    name: str
    values: float


Work = Op | Traffic


class Values(NamedTuple):
    """The number of values in the operands and the result of a contraction over a batch."""

    inputs: int
    weights: int
    outputs: int

    @classmethod
    def of(cls, product: Product, batch: int) -> Values:
        """Count the values of ``batch`` samples; a weight that samples share counts once."""
        channels = product.repeats * batch
        return cls(
            inputs=product.input**2 * product.inputs * product.rows * channels,
            weights=product.kernel**2
            * product.inputs
            * product.outputs
            * (product.repeats if product.shared else channels),
            outputs=product.output**2 * product.outputs * product.rows * channels,
        )

    def moved(self, path: Path) -> tuple[int, int, int]:
        """The values of a product's two operands and of its result."""
        x, w, y = self
        return {"FW": (x, w, y), "EB": (y, w, x), "GC": (y, x, w)}[path]


class Price(NamedTuple):
    """Seconds, joules (``None`` if no figure is known), and what the time is bound by."""

    seconds: float
    joules: float | None
    bound: Bound


@dataclass(frozen=True)
class OpStep:
    """What one op takes in a training step; ``parts`` has ``FW``, ``EB`` and ``GC``, or ``all`` for ``Traffic``."""

    parts: Mapping[str, Price]

    @property
    def seconds(self) -> float:
        """Sum over the parts: they run one after the other."""
        return sum(part.seconds for part in self.parts.values())

    @property
    def joules(self) -> float | None:
        """Sum over the parts; ``None`` if one is unknown."""
        return _joules(self.parts.values())

    @property
    def bound(self) -> Bound | None:
        """What the longest part is bound by; ``None`` if all samples skip the op."""
        return max(self.parts.values(), key=lambda part: part.seconds).bound if self.parts else None


class StepCost(NamedTuple):
    """A training step: seconds and joules of the whole batch, and each op with what bounds it.

    Work that the machine has no price for is missing from ``ops`` and from the sums.
    """

    seconds: float
    joules: float | None
    ops: dict[str, OpStep]

    @property
    def bounds(self) -> dict[str, float]:
        """Shares (0..1) of the time by what bounds it."""
        shares: dict[str, float] = {}
        for part in (part for step in self.ops.values() for part in step.parts.values()):
            shares[part.bound] = shares.get(part.bound, 0.0) + part.seconds / max(self.seconds, 1e-30)
        return shares


class Machine(Protocol):
    """A model of hardware that trains."""

    @property
    def name(self) -> str:
        """A short name, as ``fractrain plan --machine`` takes it."""

    def supports(self, precision: Precision, format: str) -> bool:
        """Whether units multiply operands of just these bits. If not, the products run at the next wider type."""

    def step(self, ops: Sequence[Work], choices: Choices, *, batch: int = 1) -> StepCost:
        """Price a training step (forward and backward, without the optimizer) of ``batch`` samples.

        Ops have ``product`` and ``macs``; ``Traffic`` has ``values`` alone. A machine leaves out of ``StepCost.ops``
        what it has no price for.

        Raises:
            ConfigError: an op has no choice, or the batch is empty.
        """


Pricer = Callable[[Work, Choice, int], Mapping[str, Price] | None]
"""The price of each part of some work if the whole batch takes a choice; ``None`` if there is no price for it."""


def sum_step(price: Pricer, ops: Sequence[Work], choices: Choices, batch: int) -> StepCost:
    """Sum ``price`` over ops and choices. Each choice is priced as if the whole batch took it, times its share."""
    if batch < 1:
        raise ConfigError(f"batch={batch} must be at least 1 sample")
    steps: dict[str, OpStep] = {}
    for op in ops:
        if op.name not in choices:
            raise ConfigError(f"{op.name!r} has no choice: give every op the precision that it is priced at")
        taken = [choice for choice in choices[op.name] if choice.share and not choice.precision.skips]
        priced = [(choice.share, parts) for choice in taken if (parts := price(op, choice, batch)) is not None]
        if len(priced) == len(taken):
            steps[op.name] = _mixed(priced)
    return StepCost(sum(step.seconds for step in steps.values()), _joules(steps.values()), steps)


def _mixed(priced: Sequence[tuple[float, Mapping[str, Price]]]) -> OpStep:
    parts: dict[str, Price] = {}
    for path in dict.fromkeys(path for _, prices in priced for path in prices):
        weighted = [(share, prices[path]) for share, prices in priced if path in prices]
        scaled = [
            Price(share * price.seconds, None if price.joules is None else share * price.joules, price.bound)
            for share, price in weighted
        ]
        longest = max(scaled, key=lambda price: price.seconds)
        parts[path] = Price(sum(price.seconds for price in scaled), _joules(scaled), longest.bound)
    return OpStep(parts)


def _joules(parts: Iterable[Price | OpStep]) -> float | None:
    total = 0.0
    for part in parts:
        if part.joules is None:
            return None
        total += part.joules
    return total
