"""The parts of a run, on the devices and processes that accelerate gives it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fractrain_fx.config import Steps, Tokens
from fractrain_fx.config.clock import Amount
from fractrain_fx.distributed import fully_shard
from fractrain_fx.engine.distributed import gather_over_ranks
from fractrain_fx.errors import ConfigError
from fractrain_fx.model.saved.folder import Weights
from fractrain_fx.training.data import DataSet, make_loader
from fractrain_fx.training.data.loader import Share
from fractrain_fx.training.graphs import CHOSEN, OwnGradients, mode_of_run
from fractrain_fx.training.length import RunLength
from fractrain_fx.training.optim import make_optimizer, make_scheduler
from fractrain_fx.training.processes import make_accelerator, random_state, set_random_state
from fractrain_fx.training.settings import CUDA_GRAPHS, TrainSettings

if TYPE_CHECKING:
    from fractrain_fx.model import FracModel

__all__ = ["Prepared"]


class Prepared:
    """The parts of a run. The process is seeded before they are made.

    Attributes:
        accelerator: accelerate's object for backward and for differences between processes.
        loader: gives this process's batches.
        length: the number of batches of an epoch and of the run.
        compile_mode: mode of ``torch.compile`` for the whole model; ``None``: it is not compiled whole.
        module: the model as training calls it: on its device, compiled, joined with the other processes.
        optimizer: has the parameters of the model and of the gates.
        scheduler: sets its learning rates.

    Raises:
        ConfigError: the device does not exist, or accelerate already runs with other settings in this process, or the
            model is to be sharded over one process that torchrun did not start.
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
        if settings.compile_segments:
            model.compile_segments()
        self._model, self._sharded = model, settings.shard
        batches = self.length.batches_before(self.length.epochs)
        self.compile_mode = mode_of_run(settings, accelerator.device, batches)
        self._graphs = OwnGradients(model.parameters()) if self.compile_mode in CUDA_GRAPHS else None
        self.module: Any
        self.optimizer: Any
        if settings.shard:
            self.module = fully_shard(model.to(accelerator.device))
            optimizer = make_optimizer(model, settings, data.task)
            self.optimizer = accelerator.prepare(optimizer)
        else:
            optimizer = make_optimizer(model, settings, data.task)
            module = model if self.compile_mode is None else torch.compile(model, mode=self.compile_mode)
            self.module, self.optimizer = accelerator.prepare(module, optimizer)
        self.scheduler = make_scheduler(optimizer, self.length)

    def call(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``module`` or :attr:`alone` in mixed precision, which accelerate has put into what it prepared."""
        from accelerate.utils import convert_to_fp32

        if not self._sharded:
            return module(*args, **kwargs)
        with self.accelerator.autocast():
            return convert_to_fp32(module(*args, **kwargs))

    @contextmanager
    def batch(self, *, step_ends: bool) -> Iterator[None]:
        """The context of a batch: gradients are averaged over the processes in the last batch of a step."""
        if self._sharded:
            self._model.set_requires_gradient_sync(step_ends)
        if self._graphs is not None:
            torch.compiler.cudagraph_mark_step_begin()
        if self._sharded or step_ends:
            yield
        else:
            with self.accelerator.no_sync(self.module):
                yield
            if self._graphs is not None:
                self._graphs.take()

    def test(self) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """This process's test batches, each with whether it counts.

        A sharded model needs the same number of calls on every process, so batches that do not count follow.
        """
        last: tuple[Tensor, Tensor] | None = None
        count = 0
        for count, (inputs, targets) in enumerate(self.loader.test(), start=1):  # noqa: B007
            last = inputs, targets
            yield inputs, targets, True
        if self._sharded:
            missing = max(gather_over_ranks(count)) - count
            inputs, targets = last or next(self.loader.train(0, 1))
            yield from ((inputs, targets, False) for _ in range(missing))

    @property
    def alone(self) -> Any:
        """``module`` without DDP, whose forward waits for the other processes."""
        return self.module.module if isinstance(self.module, DistributedDataParallel) else self.module

    @property
    def place(self) -> str:
        """The device, and whether the run chose CUDA graphs by itself, as the log tells it."""
        chosen = self._settings.compile is None and self.compile_mode is not None
        return f"{self.accelerator.device}{CHOSEN if chosen else ''}"

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
        if isinstance(unit, Steps):
            return Steps(self.length.run_steps)
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

    def weights(self) -> FracModel | Weights:
        """The model with whole weights, to be written by the first process; a collective."""
        sharding = self._model._state.sharding
        return self._model if sharding is None else Weights(sharding.whole(self._model) or {})

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, learning rate and random generators of all processes; a collective.

        A sharded optimizer's state is whole, on the CPU of the first process, under the names of the parameters.
        """
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        optimizer = self.optimizer.state_dict()
        if self._sharded:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            optimizer = get_optimizer_state_dict(self._model, self.optimizer.optimizer, options=options)
        scaler = self.accelerator.scaler
        return {
            "optimizer": optimizer,
            "scheduler": self.scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "random": gather_over_ranks(random_state(self.accelerator.device)),  # each process draws its own noise
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``. It sets the random generators, so nothing may draw before training."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        if self._sharded:
            options = StateDictOptions(full_state_dict=True)
            set_optimizer_state_dict(self._model, self.optimizer.optimizer, state["optimizer"], options=options)
        else:
            self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        set_random_state(state["random"][self.accelerator.process_index], self.accelerator.device)
