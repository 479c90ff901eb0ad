"""The sensitivities of a model: plain values, as JSON, as a table, as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from fractrain_fx.config.precision import FLOAT_BITS, Precision
from fractrain_fx.config.products import Recipe
from fractrain_fx.config.recipes import recipe_of
from fractrain_fx.durable import write_text
from fractrain_fx.errors import ConfigError, InputError, RunError
from fractrain_fx.formats.microscaling.elements import HALF_BITS
from fractrain_fx.nn.cost import OpCost
from fractrain_fx.numerics.sensitivity.rounded import OPERANDS, OperandName
from fractrain_fx.numerics.table import Printed, shortened, table
from fractrain_fx.passes import Product

__all__ = ["FILE", "MeasuredOp", "Sensitivities", "Sensitivity"]

FILE = "sensitivity.json"
"""The file in a run's folder."""

_MARK = "fractrain_fx sensitivities"
_SHOWN = (3, 4, 6)  # bits, in a table
_NAME = 24  # characters of an op, in a table


@dataclass(frozen=True)
class MeasuredOp:
    """An op and what it costs.

    Attributes:
        name, kind, module: as in :class:`fractrain_fx.passes.Op`.
        macs: of FW, EB and GC for one sample.
        block: name of its block, if it has one.
        weight: whether its second operand is a weight.
        least: fewest bits of the operands of each product.
        by_product: whether both operands of a product have its bits.
        format: the number format.
        fixed: its bits, if it was not measured because it is not rounded: 32, or 16 if another trainer keeps it in
            bf16.
        product: the op in the form that a machine prices.
        rule: the format or recipe that its rule in an allocation names; ``None`` for that of the configuration.
            ``float`` or ``bfloat16`` fix its bits, because a rule does so in the measured model, or because the op has
            no form in which it could be measured.
    """

    name: str
    kind: str
    module: str
    macs: tuple[int, int, int]
    block: str | None = None
    weight: bool = True
    least: tuple[int, int, int] = (0, 0, 0)
    by_product: bool = False
    format: str = "affine"
    fixed: int | None = None
    product: Product | None = None
    rule: str | Recipe | None = None

    @property
    def cost(self) -> OpCost:
        """The cost of its products at a precision."""
        return OpCost(self.macs, self.weight, self.least, self.by_product)

    @property
    def fixed_precision(self) -> Precision | None:
        """The precision of an op that was not measured."""
        return None if self.fixed is None else Precision(self.fixed, self.fixed)


@dataclass(frozen=True)
class Sensitivity:
    """What rounding one operand of one op to a width does, while everything else stays float.

    Attributes:
        op: name of the op.
        operand: ``x``: the activation; ``w``: the weight, or the second of two activations; ``g``: the output gradient.
        bits: the width.
        change: expected change of the loss, for ``x`` and ``w``.
        noise: for ``g``: how much its noise raises the loss in a step, as a share of what the batch's own noise does.
        variance: for ``g``: the variance that rounding adds to the gradient of the op's weight, summed over its values.
        batch_variance: the variance that the batch gives this gradient. Both are ``None`` without a trained weight.
    """

    op: str
    operand: OperandName
    bits: int
    change: float | None = None
    noise: float | None = None
    variance: float | None = None
    batch_variance: float | None = None


@dataclass(frozen=True)
class Sensitivities(Printed):
    """What rounding does to the loss of a model, op by op. Prints as a table.

    Attributes:
        ops: every counted contraction in order.
        rows: each measured op, operand and width.
        loss: the mean loss in float.
        batches: number of batches that were measured.
        model: name of the model.
        settings: of :class:`fractrain_fx.FracConfig`, as plain values, those that give unpinned ops the number formats
            in which they were measured.
    """

    ops: tuple[MeasuredOp, ...]
    rows: tuple[Sensitivity, ...]
    loss: float
    batches: int
    model: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def _by_key(self) -> Mapping[tuple[str, str, int], Sensitivity]:
        return {(row.op, row.operand, row.bits): row for row in self.rows}

    @property
    def measured(self) -> tuple[MeasuredOp, ...]:
        """The ops that are rounded in training."""
        return tuple(op for op in self.ops if op.fixed is None)

    def widths(self, op: str) -> tuple[int, ...]:
        """The widths that were measured for an op."""
        return tuple(dict.fromkeys(row.bits for row in self.rows if row.op == op))

    def of(self, op: str, operand: OperandName, bits: int) -> Sensitivity:
        """The row of an operand at a width.

        Raises:
            ConfigError: it was not measured.
        """
        if (op, operand, bits) not in self._by_key:
            raise ConfigError(
                f"operand {operand!r} of {op!r} was not measured at {bits} bits: write precisions=[..., {bits}] in "
                "sensitivity()"
            )
        return self._by_key[op, operand, bits]

    def harm(self, op: str, precision: Precision, noise_price: float) -> float:
        """The expected change of the loss if an op trains at a precision.

        Args:
            op: its name.
            precision: forward and backward bits; 32 change nothing, nor do 16 that were not measured.
            noise_price: what the noise of gradients costs, in units of the loss, where it is as harmful as the batch's.
        """
        total = 0.0
        if not self._harmless(op, precision.fw):
            total += sum(self.of(op, operand, precision.fw).change or 0.0 for operand in ("x", "w"))
        if not self._harmless(op, precision.bw):
            total += noise_price * (self.of(op, "g", precision.bw).noise or 0.0)
        return total

    def _harmless(self, op: str, bits: int) -> bool:
        return bits == FLOAT_BITS or (bits == HALF_BITS and bits not in self.widths(op))

    def cost(self, precision: Precision | str | Mapping[str, Precision]) -> float:
        """The cost of training (``cp_total``), in per cent, at one precision or at one for each measured op."""
        if isinstance(precision, str):
            precision = Precision.parse(precision)
        spent = 0.0
        for op in self.ops:
            bits = op.fixed_precision
            if bits is None:
                bits = precision if isinstance(precision, Precision) else precision.get(op.name)
            if bits is None:
                raise ConfigError(f"there is no precision for {op.name!r}: give one for every measured op")
            spent += sum(op.cost.spent(bits))
        return 100 * spent / sum(sum(op.macs) for op in self.ops)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"file": _MARK, **asdict(self)}

    def to_json(self, path: str | Path) -> None:
        """Write as JSON."""
        write_text(Path(path), json.dumps(self.to_dict()))

    @classmethod
    def from_json(cls, path: str | Path) -> Sensitivities:
        """Read what ``to_json`` wrote.

        Raises:
            RunError: there is no such file, or it holds something else.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(f"{path} cannot be read as sensitivities: {error}") from error
        if not isinstance(values, dict) or values.get("file") != _MARK:
            raise RunError(f"{path} does not hold sensitivities: 'fractrain sensitivity RUN --out {path}' writes them")
        try:
            ops = tuple(
                MeasuredOp(
                    **{
                        **op,
                        "macs": tuple(op["macs"]),
                        "least": tuple(op["least"]),
                        "product": None if op["product"] is None else Product(**op["product"]),
                        "rule": recipe_of(op["rule"]) if isinstance(op.get("rule"), Mapping) else op.get("rule"),
                    }
                )
                for op in values["ops"]
            )
            rows = tuple(Sensitivity(**row) for row in values["rows"])
            return cls(ops, rows, values["loss"], values["batches"], values["model"], values.get("settings", {}))
        except (KeyError, TypeError) as error:
            raise RunError(
                f"{path} holds sensitivities of another version of this package ({type(error).__name__}: {error}): "
                "measure the run again with 'fractrain sensitivity RUN'"
            ) from error

    def to_svg(self, path: str | Path) -> None:
        """Draw a heat map: ops downwards, operands and widths across."""
        from fractrain_fx.numerics.sensitivity.heat_map import heat_map

        if Path(path).suffix != ".svg":
            raise InputError(f"a heat map is an SVG file: write {Path(path).with_suffix('.svg')}")
        write_text(Path(path), heat_map(self))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from _table(self)


def _table(sensitivities: Sensitivities) -> Iterator[RenderableType]:
    """A row for each measured op, and a line that explains the columns."""
    known = sorted({row.bits for row in sensitivities.rows})
    shown = [bits for bits in _SHOWN if bits in known] or known[:3]
    numbers = [f"{operand} {bits}" for operand in OPERANDS for bits in shown]
    grid = table(["op"], numbers, f"{sensitivities.model}: loss {sensitivities.loss:.4g} in float")
    for op in sensitivities.measured:
        rows = {(row.operand, row.bits): row for row in sensitivities.rows if row.op == op.name}
        cells = [_cell(rows.get((operand, bits))) for operand in OPERANDS for bits in shown]
        grid.add_row(Text(shortened(op.name, _NAME)), *cells)
    yield grid
    yield Text(
        "x, w: expected change of the loss if this op's activation or weight alone is rounded to so many bits. "
        "g: the noise of its rounded gradient, in per cent of the harm that the batch's own noise does in a step."
    )


def _cell(row: Sensitivity | None) -> str:
    if row is None:
        return ""
    return _short(100 * row.noise) if row.noise is not None else _short(row.change or 0.0)


def _short(value: float) -> str:
    """A number in five characters."""
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:.2f}"[:5]
    digits, exponent = f"{value:.0e}".split("e")
    return f"{digits}e{int(exponent)}"
