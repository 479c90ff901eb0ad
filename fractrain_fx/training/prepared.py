"""The parts of a run, on the devices and processes that accelerate gives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from fractrain_fx.config import Steps, Tokens
from fractrain_fx.config.clock import Amount
from fractrain_fx.errors import ConfigError
from fractrain_fx.training.data import DataSet, make_loader
from fractrain_fx.training.data.loader import Share
from fractrain_fx.training.length import RunLength
from fractrain_fx.training.optim import make_optimizer, make_scheduler
from fractrain_fx.training.processes import make_accelerator, random_state, set_random_state
from fractrain_fx.training.settings import TrainSettings

if TYPE_CHECKING:
    from fractrain_fx.model import FracModel

__all__ = ["Prepared"]


class Prepared:
    """The parts of a run. The process is seeded before they are made.

    Attributes:
        accelerator: accelerate's object for backward and for differences between processes.
        loader: gives this process's batches.
        length: the number of batches of an epoch and of the run.
        module: the model as training calls it: on its device, compiled, joined with the other processes.
        optimizer: has the parameters of the model and of the gates.
        scheduler: sets its learning rates.

    Raises:
        ConfigError: the device does not exist, or accelerate already runs with other settings in this process.
        ModelError: checkpointing is asked for, and the model has no part that could run again.
        DataError: there are fewer training samples than processes.
    """

    def __init__(self, model: FracModel, data: DataSet, settings: TrainSettings) -> None:
        self._data, self._settings = data, settings
        self.accelerator = accelerator = make_accelerator(settings)
        share = Share(
            settings.batch_size,
            settings.seed,
            accelerator.device,
            accelerator.process_index,
            accelerator.num_processes,
            settings.workers,
        )
        self.loader = make_loader(data, share)
        self.length = RunLength(settings, self.loader.steps)
        if settings.checkpointing:
            model.gradient_checkpointing_enable()
        module = torch.compile(model) if settings.compile else model
        optimizer = make_optimizer(model, settings, data.task)
        self.module, self.optimizer = accelerator.prepare(module, optimizer)
        self.scheduler = make_scheduler(optimizer, settings, self.length.epoch_steps)

    @property
    def alone(self) -> Any:
        """``module`` without DDP, whose forward waits for the other processes."""
        return self.module.module if isinstance(self.module, DistributedDataParallel) else self.module

    @property
    def rate(self) -> float:
        """The model's learning rate in the next step."""
        return float(self.scheduler.get_last_lr()[0])

    def length_in(self, unit: Amount | None) -> Amount | None:
        """The length of the run in the unit of a clock; ``None`` for epochs.

        Raises:
            ConfigError: the clock counts tokens, and the data set has none.
        """
        if unit is None:
            return None
        steps = self.length.steps_before(self.length.epochs)
        if isinstance(unit, Steps):
            return Steps(steps)
        if self._data.task != "language":
            raise ConfigError(
                f"every={str(unit)!r} counts tokens, and {self._data.name} has none: count steps, every='100 steps'"
            )
        samples = self.length.batches_before(self.length.epochs) * self._settings.batch_size
        return Tokens(samples * self.accelerator.num_processes * self._data.example(1).shape[1])

    def step(self) -> None:
        """Update the parameters, then drop the gradients."""
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, learning rate and random generators of all processes; a collective."""
        from accelerate.utils import gather_object

        scaler = self.accelerator.scaler
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "random": gather_object([random_state(self.accelerator.device)]),  # each process draws its own noise
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``. It sets the random generators, so nothing may draw before training."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        set_random_state(state["random"][self.accelerator.process_index], self.accelerator.device)
