"""The event files of a run for TensorBoard: one set by epochs, one by optimizer steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fractrain_fx.numerics import WatchedStep
from fractrain_fx.training.log.look import Look

__all__ = ["Board", "has_tensorboard"]

_SHARES = ("cp", "cp_total", "fw", "eb", "gc")


def has_tensorboard() -> bool:
    """Whether TensorBoard is installed."""
    return importlib.util.find_spec("tensorboard") is not None


class Board:
    """Writes ``tensorboard/`` (by epochs) and ``tensorboard/steps/`` in a run's folder.

    They are two runs of TensorBoard, because a resumed run drops what was written after its checkpoint, and epochs and
    steps count differently.

    Args:
        out: the run's folder.
        epoch: epochs that a resumed run has already done.
        step: optimizer steps that it has already done.
    """

    def __init__(self, out: Path, *, epoch: int, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._epochs = SummaryWriter(str(out / "tensorboard"), purge_step=epoch + 1)
        self._steps = SummaryWriter(str(out / "tensorboard" / "steps"), purge_step=step + 1)

    def epoch(self, values: Mapping[str, Any], bits: Mapping[str, float]) -> None:
        """Write the numbers of an epoch: a line of ``metrics.jsonl``, and the mean forward bits of each block."""
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float) and name != "epoch"}
        _add(self._epochs, numbers | {"stage": values["stage"] + 1}, bits, values["epoch"])
        self._epochs.flush()
        self._steps.flush()

    def step(self, look: Look, speed: float) -> None:
        """Write the numbers of a step; ``speed`` is in samples a second."""
        numbers = {name: getattr(look, name) for name in ("loss", "cp", "cp_total", "stage")}
        _add(self._steps, numbers | {"lr": look.rate, "samples_per_second": speed}, look.bits, look.place.total)

    def numerics(self, seen: WatchedStep) -> None:
        """Write a watched step: histograms over the ops of each operand's bits that survive, and of block scales."""
        for letter in "xwg":
            own = [each.statistics for each in seen.operands if each.operand == letter and not each.as_if]
            bits = [each.effective_bits for each in own if each.effective_bits is not None]
            if bits:
                self._steps.add_histogram(f"effective_bits/{letter}", torch.tensor(bits), seen.step)
        for each in seen.operands:
            name = f"{each.op}/{each.operand}.{each.products[0]}" + (f".as_{each.as_if}" if each.as_if else "")
            if each.statistics.sqnr is not None:
                self._steps.add_scalar(f"sqnr/{name}", each.statistics.sqnr, seen.step)
            if each.statistics.scales:
                exponents = torch.tensor(list(each.statistics.scales))
                counts = torch.tensor(list(each.statistics.scales.values()))
                self._steps.add_histogram(f"scales/{name}", exponents.repeat_interleave(counts), seen.step)

    def close(self) -> None:
        """Write what is left."""
        self._epochs.close()
        self._steps.close()


def _add(writer: Any, numbers: Mapping[str, float], bits: Mapping[str, float], place: int) -> None:
    """Write numbers at a step; people read them, so shares of cost are in per cent and named so."""
    for name, value in numbers.items():
        if name in _SHARES:
            writer.add_scalar(f"{name}_percent", 100 * value, place)
        else:
            writer.add_scalar(name, value, place)
    for block, mean in bits.items():
        writer.add_scalar(f"bits/{block}", mean, place)
