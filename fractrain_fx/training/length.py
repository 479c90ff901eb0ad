"""The numbers of epochs, optimizer steps and batches of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fractrain_fx.training.settings import TrainSettings

__all__ = ["RunLength", "StepPlace"]


@dataclass(frozen=True)
class StepPlace:
    """The place of an optimizer step in its run.

    Attributes:
        epoch, epochs: its epoch, counted from 1, and the number of epochs.
        step, steps: its number in the epoch, counted from 1, and the number of steps of the epoch.
        total: its number in the run, counted from 1.
    """

    epoch: int
    epochs: int
    step: int
    steps: int
    total: int


@dataclass(frozen=True)
class RunLength:
    """Numbers of epochs, optimizer steps and batches in one process.

    Attributes:
        settings: give the length of the run and of an epoch, and the batches of a step.
        pass_batches: batches of one pass over the training samples.
    """

    settings: TrainSettings
    pass_batches: int

    @property
    def epochs(self) -> int:
        """Epochs of the whole run; the last may be cut short by ``iterations``."""
        return math.ceil(self.run_steps / self.epoch_steps)

    @property
    def run_steps(self) -> int:
        """Optimizer steps of the whole run."""
        settings = self.settings
        return settings.epochs * self.epoch_steps if settings.iterations is None else settings.iterations

    @property
    def epoch_steps(self) -> int:
        """Optimizer steps of an epoch."""
        return self.settings.epoch_steps or math.ceil(self.pass_batches / self.settings.accumulate)

    @property
    def epoch_batches(self) -> int:
        """Batches of an epoch that is not cut short."""
        return self.epoch_steps * self.settings.accumulate if self.settings.epoch_steps else self.pass_batches

    def batches(self, epoch: int) -> int:
        """Batches of an epoch, counted from 0."""
        steps = self.run_steps - epoch * self.epoch_steps
        return min(self.epoch_batches, steps * self.settings.accumulate)

    def batches_before(self, epoch: int) -> int:
        """Batches of all epochs before one, counted from 0."""
        last = self.epochs - 1  # the only epoch that can be cut short
        return epoch * self.epoch_batches if epoch <= last else last * self.epoch_batches + self.batches(last)

    def steps(self, epoch: int) -> int:
        """Optimizer steps of an epoch, counted from 0."""
        return math.ceil(self.batches(epoch) / self.settings.accumulate)

    def steps_before(self, epoch: int) -> int:
        """Optimizer steps of all epochs before one, counted from 0."""
        return min(epoch * self.epoch_steps, self.run_steps)

    def step_of(self, epoch: int, batch: int) -> tuple[int, bool]:
        """Batches of the optimizer step that a batch belongs to, and whether the batch is its last.

        The last step of an epoch may have fewer batches than ``accumulate``. Arguments as in :meth:`place`.
        """
        accumulate = self.settings.accumulate
        before = (batch - 1) // accumulate * accumulate
        size = min(accumulate, self.batches(epoch) - before)
        return size, batch == before + size

    def place(self, epoch: int, batch: int) -> StepPlace:
        """The place of the step that a batch (counted from 1) of an epoch (counted from 0) belongs to."""
        step = math.ceil(batch / self.settings.accumulate)
        return StepPlace(epoch + 1, self.epochs, step, self.steps(epoch), self.steps_before(epoch) + step)
