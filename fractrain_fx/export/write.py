"""Write a model for another library: one file for each format, checked before anything is written."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from fractrain_fx.capture import Recording
from fractrain_fx.errors import ExportError, near, require_packages
from fractrain_fx.export.factors import FrozenFactor, FrozenOp
from fractrain_fx.export.result import Exported, sizes_of
from fractrain_fx.export.rounding import LevelsName

__all__ = ["FORMATS", "Request", "check", "require_known_format", "write"]

FORMATS: dict[str, tuple[str, ...]] = {
    "onnx": ("fold_batch_norm", "fold_weights", "dynamic"),
    "compressed-tensors": (),
    "torchao": (),
}
"""The options of each format."""


@dataclass(frozen=True)
class Request:
    """What is to be written.

    Attributes:
        original: the model that was recorded.
        recording: with its shown graphs.
        ops: its rounded products.
        skipped: blocks that every sample skips.
        levels: those of format ``affine``.
        batches: inputs to measure on.
        options: of the format.
    """

    original: nn.Module
    recording: Recording
    ops: Sequence[FrozenOp]
    skipped: Collection[str] = ()
    levels: LevelsName = "exact"
    batches: Sequence[Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def factors(self) -> list[tuple[FrozenOp, FrozenFactor]]:
        """The factors that are rounded, each with its op."""
        return [(op, factor) for op in self.ops for factor in op.factors if factor.is_rounded]


def require_known_format(format: str, options: Mapping[str, Any]) -> None:
    """Check the name of a format and of its options, and that its library is installed.

    Raises:
        ExportError: a name is unknown.
        MissingPackageError: the library is not installed.
    """
    if format not in FORMATS:
        raise ExportError(
            f"format={format!r} is unknown: write one of {', '.join(FORMATS)}.{near(str(format), FORMATS)}"
        )
    known = FORMATS[format]
    for name in options:
        if name not in known:
            raise ExportError(
                f"format {format!r} has no option {name!r}" + (f": it has {', '.join(known)}" if known else "")
            )
    require_packages(f"export(format={format!r})", "export")


def check(format: str, request: Request) -> None:
    """Check that a format can hold what is to be written.

    Raises:
        ExportError: it cannot; the message has the reason and the way out.
    """
    for op, factor in request.factors:
        if factor.fmt.name in ("dorefa", "wageubn"):
            raise ExportError(
                f"{op.name} is rounded in format {factor.fmt.name!r}, whose values no file format holds: its levels "
                "come from a function of the whole tensor. deployed() runs it here; to export, train with 'affine', "
                "'mx', 'nvfp4' or 'fp8'"
            )
    _writer(format).check(request)


def write(folder: Path, format: str, request: Request) -> Exported:
    """Write the files of a format into a folder, which is made if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    notes = tuple(_writer(format).write(folder, request))
    return Exported(folder, format, sizes_of(folder), notes)


def _writer(format: str) -> ModuleType:
    names = {"onnx": "onnx", "torchao": "torchao", "compressed-tensors": "compressed"}
    return importlib.import_module(f"fractrain_fx.export.{names[format]}")
