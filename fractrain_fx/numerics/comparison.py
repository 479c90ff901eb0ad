"""A rewritten model beside its float twin on one batch: where it differs, and which ops are to blame."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from torch import Tensor

from fractrain_fx.errors import ConfigError
from fractrain_fx.execution.roundings import Rounding
from fractrain_fx.numerics.criterion import Criterion
from fractrain_fx.numerics.examine import observed_pass, twin_of
from fractrain_fx.numerics.findings import Finding, Peak, find, peak_of
from fractrain_fx.numerics.observe import StepObservations
from fractrain_fx.numerics.records import OperandRecord, find_record
from fractrain_fx.numerics.shares import (
    difference,
    distance,
    estimated_shares,
    outputs_of,
    switched_shares,
    weights_of,
)
from fractrain_fx.numerics.statistics import Statistics
from fractrain_fx.numerics.table import Printed, comparison_table
from fractrain_fx.numerics.twin import Twin

__all__ = ["Comparison", "OpDifference", "compare"]

How = Literal["switched", "estimated"]

_SWITCHED = 64  # ops that are switched to float one by one unless the caller asks for more


@dataclass(frozen=True)
class OpDifference:
    """One op beside its float twin. Differences are norms, relative to the norm of the float value.

    Attributes:
        name: the op's name.
        output: difference of its output; ``None`` if it is no tensor or the float value is 0.
        gradient: difference of the gradient of its output.
        weight: difference of the gradient of its weight.
        output_share: share of the final difference of the model's output that comes from this op, 0..1.
        gradient_share: share of the final difference of all weights' gradients.
    """

    name: str
    output: float | None
    gradient: float | None
    weight: float | None
    output_share: float
    gradient_share: float

    @property
    def share(self) -> float:
        """The larger of both shares."""
        return max(self.output_share, self.gradient_share)


@dataclass(frozen=True)
class Comparison(Printed, JupyterMixin):
    """The result of :func:`compare`. Printed by rich, it is a table that fits 80 columns.

    Attributes:
        ops: every contraction, in the order of the forward pass.
        findings: the operands beyond a bound, in the order in which a step computes them.
        how: whether shares come from switching ops to float one by one, or are estimated from one pass.
        output: difference of the model's output.
        gradient: difference of the gradients of all weights.
        loss: the loss.
        float_loss: the loss of the float twin.
        operands: the statistics of every operand.
    """

    ops: tuple[OpDifference, ...]
    findings: tuple[Finding, ...]
    how: How
    output: float | None
    gradient: float | None
    loss: float
    float_loss: float
    operands: tuple[OperandRecord, ...]

    @property
    def first(self) -> Finding | None:
        """The first operand beyond a bound; ``None`` if there is none."""
        return self.findings[0] if self.findings else None

    @property
    def by_share(self) -> list[OpDifference]:
        """The ops, those that most of the final difference comes from first."""
        return sorted(self.ops, key=lambda op: -op.share)

    def of(self, op: str, operand: str, product: str = "FW") -> Statistics:
        """The statistics of one operand.

        Raises:
            KeyError: there is no such operand.
        """
        record = find_record(self.operands, op, operand, product)
        if record is None:
            raise KeyError(f"{op!r} has no operand {operand!r} of {product}")
        return record.statistics

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "loss": self.loss,
            "float_loss": self.float_loss,
            "output": self.output,
            "gradient": self.gradient,
            "shares": self.how,
            "ops": [asdict(op) for op in self.ops],
            "findings": [asdict(finding) for finding in self.findings],
            "operands": [operand.to_dict() for operand in self.operands],
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from comparison_table(self, options.max_width)


def compare(
    model: Any,
    batch: Any,
    *,
    criterion: Criterion | None = None,
    bound: float = 0.4,
    shares: How | None = None,
) -> Comparison:
    """Run a batch through a rewritten model and through the same graph without rounding.

    Both run in training mode, with the same dropout and the same choices of gates, and leave the model as it is.

    Args:
        model: the rewritten model.
        batch: ``(inputs, targets)`` with ``criterion``, as :func:`sensitivity` takes it. Without one also a mapping of
            keyword arguments, a pair of input and targets, or an input.
        criterion: gets the model's output and the targets, and returns the loss, such as ``F.cross_entropy``. By
            default it is the output's own ``loss``, or cross-entropy or the mean squared error with the targets, or
            without targets the mean square of the output.
        bound: largest rounding error of an operand, relative to its norm, that is not named; twice that for
            gradients, which are rounded stochastically.
        shares: how to find which ops the final difference comes from: ``switched`` runs the model once for each op with
            that op in float; ``estimated`` weighs each op's own error by its gradient. By default ops are switched if
            there are at most 64.

    Raises:
        InputError: the model was not made by fractrainify, the batch of a ``criterion`` is not a pair, or no loss is
            known for the output.
        ConfigError: ``bound`` is not positive, or ``shares`` is unknown.
        ModelError: the model is sharded, or holds codes in place of float weights.
    """
    if not bound > 0:
        raise ConfigError(f"bound={bound!r} must be a positive number: 0.4 names errors above 0.4 of the norm")
    if shares not in (None, "switched", "estimated"):
        raise ConfigError(f"shares={shares!r} is unknown: write 'switched' or 'estimated'")
    with twin_of(model, batch, criterion) as twin:
        return _compared(twin, bound, shares)


def _compared(twin: Twin, bound: float, shares: How | None) -> Comparison:
    rounds = twin.rounding
    how: How = shares or ("switched" if len(rounds) <= _SWITCHED else "estimated")
    observations = _SeenClosely()
    rounded, records = observed_pass(twin, observations, locally=how == "estimated")
    exact = twin.run(twin.ops, rounded.choices)
    for name, y in rounded.outputs.items():
        observations.note_peak(name, "y", y, batched=True)
    if how == "switched":
        output_shares, gradient_shares = switched_shares(twin, rounds, rounded, exact)
    else:
        output_shares, gradient_shares = estimated_shares(rounds, rounded, records)
    ops = tuple(
        OpDifference(
            name,
            difference(rounded.outputs.get(name), exact.outputs.get(name)),
            difference(rounded.gradients.get(name), exact.gradients.get(name)),
            difference(rounded.weights.get(f"{name}.weight"), exact.weights.get(f"{name}.weight")),
            output_shares.get(name, 0.0),
            gradient_shares.get(name, 0.0),
        )
        for name in twin.ops
    )
    assert rounded.loss is not None and exact.loss is not None
    return Comparison(
        ops,
        find(records, list(twin.ops), bound, observations.peaks),
        how,
        distance(*outputs_of(rounded, exact)),
        distance(*weights_of(rounded, exact)),
        float(rounded.loss.detach()),
        float(exact.loss.detach()),
        records,
    )


class _SeenClosely(StepObservations):
    """Also looks for channels, heads and positions that are far larger than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.peaks: dict[tuple[str, str], Peak] = {}

    def add_rounding(self, op: str, rounding: Rounding, products: Any, *args: Any, **options: Any) -> None:
        super().add_rounding(op, rounding, products, *args, **options)
        if "FW" in products:
            self.note_peak(op, rounding.of.tensor, rounding.values, batched=not rounding.of.weight)

    def note_peak(self, op: str, operand: str, x: Tensor, *, batched: bool) -> None:
        """Look at a tensor of the forward product."""
        peak = peak_of(x, batched=batched)
        if peak is not None:
            self.peaks[op, operand] = peak
