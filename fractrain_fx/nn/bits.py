"""Bit widths as data: buffers that quantizers read, so that a new stage does not change the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fractrain_fx.config.precision import Precision

__all__ = ["FollowsStage", "OwnBits", "StageBits", "WidthTable", "set_stage", "stage_of"]


class FollowsStage(nn.Module):
    """A module whose buffers depend on the stage."""

    def set(self, stage: Precision) -> None:
        """Change the buffers to those of a stage, in place."""
        raise NotImplementedError


class StageBits(FollowsStage):
    """The precision of the stage, which scheduled ops without bits of their own have, as data that a graph reads."""

    fw: Tensor
    bw: Tensor

    def __init__(self, precision: Precision) -> None:
        super().__init__()
        self.register_buffer("fw", torch.tensor(precision.fw, dtype=torch.int32))
        self.register_buffer("bw", torch.tensor(precision.bw, dtype=torch.int32))
        self._know(precision)

    @property
    def known(self) -> Precision:
        """The same on the host, for a backend whose kernels depend on it.

        It waits for the device if the buffers changed since it was read last. A compiled graph that reads it is
        compiled once for each precision. It sees buffers that :meth:`set` or a checkpoint changed; other writes, such
        as those of an average of models, show in eager mode only.
        """
        if not torch.compiler.is_compiling():
            self._look()
        return self._known

    def set(self, precision: Precision) -> None:
        """Change the precision in place (0-dim int32 buffers)."""
        self.fw.fill_(precision.fw)
        self.bw.fill_(precision.bw)
        self._know(precision)

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        self._look()

    def _look(self) -> None:
        """Read the buffers if they were written to, or replaced."""
        moments = zip(self._moments(), self._known_at, strict=True)
        held = all(type(x) is Tensor and not x.is_meta for x in (self.fw, self.bw))
        if held and not all(now is before and version == then for (now, version), (before, then) in moments):
            self._know(Precision(int(self.fw), int(self.bw)))

    def _know(self, precision: Precision) -> None:
        self._known, self._known_at = precision, self._moments()

    def _moments(self) -> tuple[tuple[Tensor, int], ...]:
        """The buffers, and the number of writes into each; those made in inference mode count none."""
        return tuple((x, 0 if x.is_inference() else x._version) for x in (self.fw, self.bw))


class OwnBits(NamedTuple):
    """The precision of an op with its own bits in each stage; ``by_stage`` maps the stage's precision to the op's."""

    stage: StageBits
    by_stage: Mapping[Precision, Precision]

    @property
    def known(self) -> Precision:
        """The bits that it has now, on the host."""
        return self.by_stage[self.stage.known]


def stage_of(model: nn.Module) -> Precision | None:
    """The precision of a model's scheduled ops; ``None`` without any, or without values. Waits for the device."""
    stages = (module for module in model.modules() if isinstance(module, StageBits))
    held = (bits for bits in stages if type(bits.fw) is Tensor and not bits.fw.is_meta)
    return next((Precision(int(bits.fw), int(bits.bw)) for bits in held), None)


def set_stage(model: nn.Module, precision: Precision) -> None:
    """Set the stage of a model's scheduled ops by its precision, without changing its graph."""
    for module in model.modules():
        if isinstance(module, FollowsStage):
            module.set(precision)


class WidthTable(FollowsStage):
    """Widths that are not the stage's own, each in a 0-dim int32 buffer.

    Those of pinned ops and of gated weights are constant. Those of ops with a width for each stage follow the stage.
    """

    def __init__(self) -> None:
        super().__init__()
        self._staged: dict[str, dict[Precision, int]] = {}

    def add_staged(self, stages: Sequence[Precision], widths: Sequence[int]) -> str:
        """Make the buffer for a width in each stage, unless it exists, and return its name."""
        name = f"s{'_'.join(map(str, widths))}"
        if name not in self._buffers:
            self.register_buffer(name, torch.tensor(widths[0], dtype=torch.int32))
            self._staged[name] = dict(zip(stages, widths, strict=True))
        return name

    def width_at(self, name: str, stage: Precision) -> int:
        """The width of a buffer in a stage."""
        return self._staged[name][stage] if name in self._staged else int(self.get_buffer(name))

    def set(self, stage: Precision) -> None:
        """Change the widths that follow the stage, in place."""
        for name, widths in self._staged.items():
            self.get_buffer(name).fill_(widths[stage])

    def add(self, bits: int) -> str:
        """Make the buffer for a width, unless it exists, and return its name."""
        name = f"b{bits}"
        if name not in self._buffers:
            self.register_buffer(name, torch.tensor(bits, dtype=torch.int32))
        return name
