"""The training loop: one task, one model, the engine; devices and processes are accelerate's business."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fractrain_fx.engine import Engine
from fractrain_fx.engine.distributed import sum_over_ranks
from fractrain_fx.errors import ConfigError, NonFiniteLossError, RunError
from fractrain_fx.hardware.run_cost import StepPrices, run_cost
from fractrain_fx.training.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint, save_checkpoint
from fractrain_fx.training.data import DataSet, make_loader
from fractrain_fx.training.data.loader import Share
from fractrain_fx.training.interrupt import Interrupt
from fractrain_fx.training.log import RunLog
from fractrain_fx.training.messages import announcement, epoch_line, step_line
from fractrain_fx.training.objective import Objective
from fractrain_fx.training.optim import epochs_of_run, make_optimizer, make_scheduler, steps_of_run
from fractrain_fx.training.processes import make_accelerator, random_state, set_random_state, share_buffers
from fractrain_fx.training.records import EpochRecord, Start
from fractrain_fx.training.results import RunResult
from fractrain_fx.training.settings import TrainSettings

if TYPE_CHECKING:
    from fractrain_fx.model import FracModel

__all__ = ["Trainer"]

_STEPS_BETWEEN_LOOKS = 10  # at the loss: each look waits for the device
_NO_MATTER = ("device", "workers", "data_dir")  # a run may go on with other values of these


class Trainer:
    """Trains a ``FracModel`` on a data set and says what it cost.

    A checkpoint is written before the first epoch and after each one, so a run that was stopped goes on from the end
    of its last whole epoch, with the same numbers as if it had not been stopped (bit for bit on a CPU).

    Args:
        model: what ``fractrainify`` made.
        data: training and test samples.
        settings: the loop.
        out: folder for checkpoints, metrics and TensorBoard; ``None`` keeps nothing.
        label: how tables call this run; by default the method.
        input_name: keyword of the model's input; ``None``: its first positional argument.
        console: where to report.
        config: what a checkpoint must agree with; by default the loop's settings and the model's configuration.

    Raises:
        ConfigError: the device is not there, or accelerate already runs with other settings in this process.
        DataError: there are fewer training samples than processes.
    """

    def __init__(
        self,
        model: FracModel,
        data: DataSet,
        settings: TrainSettings | None = None,
        *,
        out: Path | None = None,
        label: str | None = None,
        input_name: str | None = None,
        console: Console | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.data = data
        self.settings = settings or TrainSettings()
        self.out = out
        self.label = label or model.config.method
        self.objective = Objective.of(data)
        self._input_name = input_name
        self._console = console
        self._accelerator = make_accelerator(self.settings)
        self._config = config or asdict(self.settings) | model.config.to_dict()
        self._set_up()
        self.engine = Engine(model, accumulate=self.settings.accumulate, epochs=self.epochs)
        self._resumed = False
        self._interrupt = Interrupt()
        self._epoch = 0
        self._seconds = 0.0
        self._best: dict[str, float] = {}
        self._value = math.nan

    def fit(self) -> RunResult:
        """Train all epochs (the remaining ones, after :meth:`resume`), evaluating after each.

        Raises:
            NonFiniteLossError: a loss or a weight was NaN or infinite; the message names the last good checkpoint.
            RunError: ``out`` holds another run's checkpoint.
        """
        if self.out is not None and self._epoch == 0 and not self._resumed and latest_checkpoint(self.out) is not None:
            raise RunError(f"{self.out} holds a run: call resume() first, or write to another folder")
        batches = sum(self._batches(epoch) for epoch in range(self.epochs))
        done = sum(self._batches(epoch) for epoch in range(self._epoch))
        with RunLog(self.out, batches, done=done, epoch=self._epoch, active=self.is_main, console=self._console) as log:
            log.say(self._announcement())
            if self._epoch == 0 and not self._resumed:
                self._save()  # so that a run interrupted at once can go on too
            try:
                with self._interrupt:
                    while self._epoch < self.epochs:
                        self._train_epoch(log)
            except NonFiniteLossError as error:
                raise NonFiniteLossError(f"{error}. {self._last_good()}") from error
        result = self.result()
        if self.out is not None and self.is_main:
            result.to_json(self.out / "result.json")
        return result

    def resume(self) -> None:
        """Go on from the newest checkpoint of ``out``.

        Raises:
            RunError: there is none, it is damaged, or another configuration made it.
        """
        if self.out is None:
            raise ConfigError("a Trainer without a folder has nothing to resume from: give out=...")
        checkpoint = load_checkpoint(self.out, self.model, self._identity())
        self._optimizer.load_state_dict(checkpoint.tensors["optimizer"])
        self._scheduler.load_state_dict(checkpoint.tensors["scheduler"])
        if self._accelerator.scaler is not None:
            self._accelerator.scaler.load_state_dict(checkpoint.tensors["scaler"])
        self.engine.load_state_dict(checkpoint.state["engine"])
        self._resumed = True
        self._epoch = checkpoint.epoch
        self._seconds = checkpoint.state["seconds"]
        self._best = dict(checkpoint.state["best"])
        self._value = math.nan if checkpoint.state["value"] is None else checkpoint.state["value"]
        set_random_state(checkpoint.tensors["random"][self._accelerator.process_index], self._accelerator.device)

    def evaluate(self) -> tuple[float, float]:
        """Mean test loss and the objective's measure over the test samples of all processes."""
        share_buffers(self.model)
        # Past DDP, whose forward waits for the other processes: they may have a batch more or less.
        inner = self._wrapped.module if isinstance(self._wrapped, DistributedDataParallel) else self._wrapped
        inner.eval()
        meter = self.objective.meter().to(self._accelerator.device)
        loss = torch.zeros((), device=self._accelerator.device)
        with torch.no_grad():
            for inputs, targets in self._loader.test():
                logits = self._forward(inner, inputs)
                loss += self.objective.loss(logits, targets) * len(targets)
                meter.update(logits, targets)
        return float(sum_over_ranks(loss)) / len(self.data.test), self.objective.read(meter)

    @property
    def epochs(self) -> int:
        """Epochs of the whole run; the last may be cut short by ``iterations``."""
        return epochs_of_run(self.settings, self._steps_an_epoch)

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that reports and writes."""
        return bool(self._accelerator.is_main_process)

    def start(self, arguments: Sequence[str]) -> Start:
        """How the command line ``arguments`` started or continued this run."""
        device, processes = self._accelerator.device, self._accelerator.num_processes
        return Start.now(arguments, epoch=self._epoch, device=str(device), processes=processes)

    def result(self) -> RunResult:
        """What the run has come to so far."""
        ledger = self.engine.ledger
        best = self._best or {"value": math.nan, "epoch": 0, "macs": 0.0}
        return RunResult(
            label=self.label,
            metric=self.objective.metric,
            value=self._value,
            best=best["value"],
            best_epoch=int(best["epoch"]),
            mean_cp=ledger.mean_cp,
            mean_cp_total=ledger.mean_cp_total,
            total_macs=ledger.total_macs,
            best_macs=best["macs"],
            seconds=self._seconds,
            turning_points=ledger.turning_points,
            epochs=self._epoch,
            hardware=self._hardware(int(best["epoch"])),
        )

    def _hardware(self, best_epoch: int) -> dict[str, Any]:
        """Cost to the end and to the best evaluation, in bit operations and on BitFusion."""
        rows = self.engine.ledger.rows
        return {
            "end": run_cost(self._prices, rows).to_dict(),
            "best": run_cost(self._prices, rows[:best_epoch]).to_dict(),
        }

    @cached_property
    def _prices(self) -> StepPrices:
        return StepPrices(self.model, self.settings.batch_size)

    def _set_up(self) -> None:
        settings, accelerator = self.settings, self._accelerator
        share = Share(
            settings.batch_size,
            settings.seed,
            accelerator.device,
            accelerator.process_index,
            accelerator.num_processes,
            settings.workers,
        )
        self._loader = make_loader(self.data, share)
        module = torch.compile(self.model) if settings.compile else self.model
        optimizer = make_optimizer(self.model, settings, self.data.task)
        self._wrapped, self._optimizer = accelerator.prepare(module, optimizer)
        steps = settings.epoch_steps or math.ceil(self._loader.steps / settings.accumulate)
        self._steps_an_epoch = steps
        self._batches_an_epoch = steps * settings.accumulate if settings.epoch_steps else self._loader.steps
        self._scheduler = make_scheduler(optimizer, settings, steps)

    def _batches(self, epoch: int) -> int:
        """Batches of an epoch, counted from 0."""
        steps = steps_of_run(self.settings, self._steps_an_epoch) - epoch * self._steps_an_epoch
        return min(self._batches_an_epoch, steps * self.settings.accumulate)

    def _train_epoch(self, log: RunLog) -> None:
        started = time.perf_counter()
        self._wrapped.train()
        rate = float(self._scheduler.get_last_lr()[0])
        steps = math.ceil(self._batches(self._epoch) / self.settings.accumulate)
        self._train_batches(log)
        change = self.engine.end_epoch()  # which waits for the device
        train_seconds = time.perf_counter() - started
        self._epoch += 1
        test_loss, self._value = self.evaluate()
        if self.objective.better(self._value, self._best.get("value")):
            macs = self.engine.ledger.total_macs
            self._best = {"value": self._value, "epoch": self._epoch, "macs": macs}
        self._seconds += time.perf_counter() - started
        row, metric = self.engine.ledger.rows[-1], self.objective.metric
        log.say(epoch_line(row, metric, self._value))
        hardware = run_cost(self._prices, [row]).total
        record = EpochRecord(
            row,
            metric,
            self._value,
            test_loss,
            lr=rate,
            total_macs=self.engine.ledger.total_macs,
            seconds=self._seconds,
            steps=steps,
            train_seconds=train_seconds,
            bitfusion_joules=hardware.joules,
            bitfusion_seconds=hardware.seconds,
        )
        log.epoch(record.to_dict())
        if change is not None:
            log.say(f"  {change}")
        self._save()

    def _train_batches(self, log: RunLog) -> None:
        accumulate, batches = self.settings.accumulate, self._batches(self._epoch)
        loader = self._loader.train(self._epoch * self._batches_an_epoch, batches)
        for number, (inputs, targets) in enumerate(loader, start=1):
            self._interrupt.check()
            step_ends = number % accumulate == 0 or number == batches
            with nullcontext() if step_ends else self._accelerator.no_sync(self._wrapped):
                loss = self.objective.loss(self._forward(self._wrapped, inputs), targets)
                self._accelerator.backward(self.engine.loss(loss))
            if step_ends:
                self._optimizer.step()
                self._scheduler.step()
                self._optimizer.zero_grad()
            log.step(1, self._glance(loss) if number % _STEPS_BETWEEN_LOOKS == 1 else None)

    def _forward(self, module: Any, inputs: Tensor) -> Tensor:
        named = {} if self._input_name is None else {self._input_name: inputs}
        return self.objective.logits(module(**named) if named else module(inputs))

    def _glance(self, loss: Tensor) -> str:
        """A line for the progress bar; stops a run that diverged (alone: others would wait for this process)."""
        if self._accelerator.num_processes == 1:
            self.engine.check_finite()
        cp = float(self.model.cost.cp.detach())
        return step_line(self._epoch + 1, self.epochs, self.engine, float(loss.detach()), cp)

    def _announcement(self) -> str:
        text = announcement(self.label, self.model, self.data.name, self.engine)
        return f"{text}; {self._accelerator.device}" + (f"; run folder {self.out}" if self.out is not None else "")

    def _identity(self) -> dict[str, Any]:
        """What decides this run's numbers."""
        config = {key: value for key, value in self._config.items() if key not in _NO_MATTER}
        return config | {"processes": self._accelerator.num_processes}

    def _last_good(self) -> str:
        folder = None if self.out is None else latest_checkpoint(self.out)
        return "This run keeps no checkpoints" if folder is None else f"The last good checkpoint is {folder}"

    def _save(self) -> None:
        from accelerate.utils import gather_object

        if self.out is None:
            return
        self._refuse_bad_weights()
        random = gather_object([random_state(self._accelerator.device)])  # each process draws its own noise
        if not self.is_main:
            return
        scaler = self._accelerator.scaler
        tensors = {
            "optimizer": self._optimizer.state_dict(),
            "scheduler": self._scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "random": random,
        }
        value = self._value if math.isfinite(self._value) else None
        state = {"engine": self.engine.state_dict(), "seconds": self._seconds, "best": self._best, "value": value}
        save_checkpoint(self.out, self.model, Checkpoint(self._epoch, self._identity(), state, tensors))

    def _refuse_bad_weights(self) -> None:
        """Losses look at the weights of the step before; the last step of an epoch may have spoilt them."""
        for name, parameter in self.model.named_parameters():
            if not torch.isfinite(parameter).all():
                raise NonFiniteLossError(
                    f"after epoch {self._epoch} the weight {name} is NaN or infinite: lower the learning rate"
                )
