"""Records of watched steps, and the file that keeps them: a line of JSON for each step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult

from fractrain_fx.durable import write_text, writing
from fractrain_fx.errors import InputError, RunError, near
from fractrain_fx.numerics.statistics import Statistics
from fractrain_fx.numerics.table import Printed, step_table

__all__ = [
    "FILE",
    "OperandRecord",
    "WatchedStep",
    "append_step",
    "drop_cut_line",
    "drop_steps_after",
    "find_record",
    "read_steps",
]

FILE = "numerics.jsonl"


@dataclass(frozen=True)
class OperandRecord:
    """One operand of one op in a watched step.

    Attributes:
        op: the op's name.
        operand: ``x`` and ``w``, the factors; ``g``, the gradient of the output; ``y``, the output, which is not
            rounded.
        products: the products that multiply it rounded so: ``FW``, ``EB`` (input gradient), ``GC`` (weight gradient).
        as_if: the other format or precision that the numbers are for; empty for the one that trains.
        statistics: the numbers.
    """

    op: str
    operand: str
    products: tuple[str, ...]
    statistics: Statistics
    as_if: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, the numbers beside the names."""
        names = {"op": self.op, "operand": self.operand, "products": " ".join(self.products)}
        return names | ({"as_if": self.as_if} if self.as_if else {}) | self.statistics.to_dict()

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> OperandRecord:
        """Read the result of :meth:`to_dict`."""
        names = ("op", "operand", "products", "as_if")
        statistics = Statistics.from_dict({name: value for name, value in plain.items() if name not in names})
        products = tuple(plain["products"].split())
        return cls(plain["op"], plain["operand"], products, statistics, plain.get("as_if", ""))


def find_record(
    records: Iterable[OperandRecord], op: str, operand: str, product: str | None = None, as_if: str = ""
) -> OperandRecord | None:
    """The first record of an operand, of those in one product if it is named."""
    for record in records:
        same = (record.op, record.operand, record.as_if) == (op, operand, as_if)
        if same and (product is None or product in record.products):
            return record
    return None


@dataclass(frozen=True)
class WatchedStep(Printed):
    """All that was seen of one training step. Prints as a table.

    Attributes:
        step: its number: calls of the model in training, from 1.
        ran: how the step ran.
        operands: the operands of every op, in the order in which the step read them.
        information: for each gated block, the mutual information between sample and option in bits.
        commonest: the option of each gated block that most samples got together, with the share of these samples.
    """

    step: int
    ran: str
    operands: tuple[OperandRecord, ...]
    information: dict[str, float] = field(default_factory=dict)
    commonest: tuple[dict[str, int], float] | None = None

    def of(self, op: str, operand: str, product: str | None = None, as_if: str = "") -> Statistics:
        """The numbers of one operand.

        Args:
            op: the op's name.
            operand: ``x``, ``w``, ``g`` or ``y``.
            product: ``FW``, ``EB`` or ``GC``; by default the first that reads it.
            as_if: the other format.

        Raises:
            InputError: the step has no such operand.
        """
        record = find_record(self.operands, op, operand, product, as_if)
        if record is None:
            words = f"step {self.step} has no operand {operand!r} of {op!r}" + (f" as {as_if}" if as_if else "")
            ops = {record.op: None for record in self.operands}
            raise InputError(f"{words}.{'' if op in ops else near(op, ops)} The step lists them all when it is printed")
        return record.statistics

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from step_table(self, options.max_width)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        operands = [record.to_dict() for record in self.operands]
        plain: dict[str, Any] = {"step": self.step, "ran": self.ran, "operands": operands}
        if self.commonest is not None:
            options, share = self.commonest
            plain |= {"information": self.information, "commonest": {"options": options, "share": share}}
        return plain

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> WatchedStep:
        """Read the result of :meth:`to_dict`."""
        operands = tuple(map(OperandRecord.from_dict, plain["operands"]))
        commonest = plain.get("commonest")
        return cls(
            plain["step"],
            plain["ran"],
            operands,
            plain.get("information", {}),
            None if commonest is None else (commonest["options"], commonest["share"]),
        )


def append_step(path: Path, step: WatchedStep) -> None:
    """Append a line."""
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(step.to_dict(), allow_nan=False) + "\n")


def read_steps(path: Path) -> Iterator[WatchedStep]:
    """The steps of a file, one after the other; a last line that is cut off is left out.

    Raises:
        RunError: a line is not that of a watched step.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield WatchedStep.from_dict(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                if not line.endswith("\n"):
                    return
                raise RunError(
                    f"line {number} of {path} is not a watched step ({type(error).__name__}: {error}): remove the "
                    "line, or restore the file from a copy"
                ) from error


def drop_cut_line(path: Path) -> None:
    """Drop a last line that a killed process left unfinished, before the next line is appended to it."""
    if path.exists():
        with writing(path), path.open("rb+") as file:
            file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))


def drop_steps_after(path: Path, step: int) -> None:
    """Drop the lines of later steps, which a run that goes on from a checkpoint trains again."""
    if path.exists():
        lines = [json.dumps(past.to_dict(), allow_nan=False) + "\n" for past in read_steps(path) if past.step <= step]
        write_text(path, "".join(lines))
