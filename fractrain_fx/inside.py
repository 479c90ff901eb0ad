"""What a FracModel does behind the original's face: it runs the rewritten graph, and knows what that gave and saw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fractrain_fx.capture import RecordedModule, Recording
from fractrain_fx.config import FracConfig
from fractrain_fx.errors import CalibrationError, InputError
from fractrain_fx.nn.cost import Cost
from fractrain_fx.nn.ranges import RunningRange
from fractrain_fx.nn.tuning import Tuner
from fractrain_fx.passes.graph import NAMESPACE
from fractrain_fx.running import Running

__all__ = ["Inside"]


class Inside:
    """The private state of a FracModel, out of the way of the original's attribute names.

    Attributes:
        original: the model as it was handed over.
        recording: the rewritten graphs, and the inputs they were recorded on.
        config: what they were rewritten with.
        targets: target cp of each stage in per cent, where there are gates.
        reachable: lowest and highest cp in per cent that the gates can choose, where there are any.
        cost: of the last forward.
        batch: number of samples of the last forward.
        calibrated: whether every activation range was seen.
        chain: the classes of passes that are not the default ones.
        running: the copies that run in training (``True``) and evaluation.
    """

    def __init__(self, original: nn.Module, recording: Recording, config: FracConfig) -> None:
        self.original = original
        self.recording = recording
        self.config = config
        self.targets: tuple[float, ...] = ()
        self.reachable: tuple[float, float] | None = None
        self.cost: Cost | None = None
        self.batch: int | None = None
        self.calibrated = False
        self.chain: tuple[str, ...] | None = None
        places = ("dispatched", "dispatched_in_evaluation")
        tuner = Tuner(config.kernels, compiled=config.rounding == "compiled")
        running = [Running(shown, config, tuner, place) for shown, place in zip(recording.graphs, places, strict=False)]
        self.running = {True: running[0], False: running[-1]}

    @property
    def graphs(self) -> list[RecordedModule]:
        """The graphs shown and their copies that run."""
        return [*self.recording.graphs, *(each.current() for each in self.running.values())]

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> Any:
        """Run the copy for training or evaluation; keep its cost and return the original's output.

        Raises:
            InputError: arguments that do not fit what was recorded.
            CalibrationError: evaluation before any activation range was seen.
        """
        if not (training or self.calibrated):
            raise CalibrationError(
                "this model is evaluated before its activation ranges were seen: train it for a step, "
                "load a trained checkpoint, or call model.calibrate(loader) with a few batches"
            )
        values = self.recording.call.bind(args, kwargs)
        self.batch = _samples(values, self.config.batch_axis)
        if self.recording.fixed_batch:
            self._require_recorded_batch()
        output, self.cost = self.running[training].current()(*values)
        return output

    def _require_recorded_batch(self) -> None:
        recording = self.recording
        values = recording.call.bind(recording.args, recording.kwargs)
        recorded = _samples(values, self.config.batch_axis)
        if self.batch != recorded:
            raise InputError(
                f"a batch of {self.batch}, but {type(self.original).__name__} was recorded on one of {recorded}, "
                "and its code counts its samples: pass example inputs of the batch size that you train with, and "
                "drop_last=True to the loader"
            )

    def look_for_ranges(self) -> None:
        """See whether every activation range was seen by now."""
        if not self.calibrated:
            self.calibrated = all(bool(each.seen) for each in self._ranges())

    def fill_ranges(self, batches: Iterable[Any]) -> int:
        """Let the activation ranges follow batches that a model in evaluation mode runs; returns how many."""
        for each in self._ranges():
            each.train()
        seen = 0
        with torch.no_grad():
            for batch in batches:
                args, kwargs = _call_of(batch)
                self.running[False].current()(*self.recording.call.bind(args, kwargs))
                seen += 1
        return seen

    def _ranges(self) -> list[RunningRange]:
        inserted = self.recording.train._modules.get(NAMESPACE)
        return [module for module in inserted.modules() if isinstance(module, RunningRange)] if inserted else []


def _samples(values: Iterable[Any], axis: int) -> int | None:
    return next((value.shape[axis] for value in values if isinstance(value, Tensor) and value.ndim > axis), None)


def _call_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return (batch[0],), {}
    return (batch,), {}
