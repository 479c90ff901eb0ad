"""What an export wrote, and what is otherwise in it than in evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Exported", "FixedChoices", "sizes_of"]


@dataclass(frozen=True)
class FixedChoices:
    """Options that take the place of gates, and what that costs.

    Attributes:
        options: for each gated block the number of its option.
        share: for each block the share (0..1) of the samples that chose it.
        measure: ``accuracy`` in per cent, or ``loss``.
        gated: the measure with gates.
        fixed: the measure with the fixed options.
        samples: how many samples were measured.
    """

    options: Mapping[str, int]
    share: Mapping[str, float]
    measure: str
    gated: float
    fixed: float
    samples: int

    def __str__(self) -> str:
        unit = " per cent" if self.measure == "accuracy" else ""
        return (
            f"fixing the choices of {len(self.options)} blocks takes {self.measure} from {self.gated:.4g} to "
            f"{self.fixed:.4g}{unit} on {self.samples} samples"
        )


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Attributes:
        folder: the folder.
        format: its format.
        files: the bytes of each file, by name.
        notes: what is otherwise than in evaluation, one sentence each; nothing where all is the same.
        choices: what fixing the choices of gates costs, if there were gates.
    """

    folder: Path
    format: str
    files: Mapping[str, int]
    notes: tuple[str, ...] = ()
    choices: FixedChoices | None = field(default=None)

    def __str__(self) -> str:
        total = sum(self.files.values())
        lines = [f"{self.format}: {self.folder} ({len(self.files)} files, {total:,} bytes)"]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join([*lines, *([f"  {self.choices}"] if self.choices else [])])


def sizes_of(folder: Path) -> dict[str, int]:
    """The bytes of each file of a folder, by name."""
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
