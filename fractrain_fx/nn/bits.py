"""Bit widths as data: buffers that quantizers read, so that a new stage does not change the graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fractrain_fx.config.precision import Precision

__all__ = ["StageBits", "WidthTable", "set_stage", "stage_of", "width_name"]


class StageBits(nn.Module):
    """The precision that all scheduled ops have now.

    Attributes:
        fw, bw: its bits, as data that a graph reads.
        known: the same on the host, for a backend whose kernels depend on it. A compiled graph that reads it is
            compiled once for each precision.
    """

    fw: Tensor
    bw: Tensor

    def __init__(self, precision: Precision) -> None:
        super().__init__()
        self.known = precision
        self.register_buffer("fw", torch.tensor(precision.fw, dtype=torch.int32))
        self.register_buffer("bw", torch.tensor(precision.bw, dtype=torch.int32))

    def set(self, precision: Precision) -> None:
        """Change the precision in place (0-dim int32 buffers)."""
        self.fw.fill_(precision.fw)
        self.bw.fill_(precision.bw)
        self.known = precision

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        if not self.fw.is_meta:
            self.known = Precision(int(self.fw), int(self.bw))


def stage_of(model: nn.Module) -> Precision | None:
    """The precision of a model's scheduled ops; ``None`` without any, or without values. Waits for the device."""
    found = (module for module in model.modules() if isinstance(module, StageBits))
    held = (bits for bits in found if type(bits.fw) is Tensor and not bits.fw.is_meta)
    return next((Precision(int(bits.fw), int(bits.bw)) for bits in held), None)


def set_stage(model: nn.Module, precision: Precision) -> None:
    """Set the precision of a model's scheduled ops, without changing its graph."""
    for module in model.modules():
        if isinstance(module, StageBits):
            module.set(precision)


class WidthTable(nn.Module):
    """Constant widths, those of pinned ops and of gated weights, each in a 0-dim int32 buffer."""

    def add(self, bits: int) -> str:
        """Make the buffer for a width, unless it exists, and return its name."""
        name = width_name(bits)
        if name not in self._buffers:
            self.register_buffer(name, torch.tensor(bits, dtype=torch.int32))
        return name


def width_name(bits: int) -> str:
    """Name of the buffer that holds a width."""
    return f"b{bits}"
