"""The training loop: one task, one model, the engine; devices and processes are accelerate's business."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from fractrain_fx.engine import Engine
from fractrain_fx.errors import ConfigError, DataError
from fractrain_fx.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fractrain_fx.training.data import DataSet
from fractrain_fx.training.log import RunLog
from fractrain_fx.training.objective import Objective
from fractrain_fx.training.optim import epochs_of_run, lr_factor, make_optimizer, steps_of_run
from fractrain_fx.training.results import RunResult
from fractrain_fx.training.settings import TrainSettings

if TYPE_CHECKING:
    from accelerate import Accelerator

    from fractrain_fx.model import FracModel

__all__ = ["Trainer"]

_STEPS_BETWEEN_LOOKS = 10  # at the loss: each look waits for the device


class Trainer:
    """Trains a ``FracModel`` on a data set and says what it cost.

    Args:
        model: what ``fractrainify`` made.
        data: training and test samples.
        settings: the loop.
        out: folder for checkpoints, metrics and TensorBoard; ``None`` keeps nothing.
        label: how tables call this run; by default the method.
        input_name: keyword of the model's input; ``None``: its first positional argument.
        console: where to report.

    Raises:
        ConfigError: the device is not there, or accelerate already runs with other settings in this process.
        DataError: there are fewer training samples than processes need for one batch.
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
    ) -> None:
        self.model = model
        self.data = data
        self.settings = settings or TrainSettings()
        self.out = out
        self.label = label or model.config.method
        self.objective = Objective.of(data)
        self._input_name = input_name
        self._console = console
        self._accelerator = _accelerator(self.settings)
        self._set_up()
        self.engine = Engine(model, accumulate=self.settings.accumulate, epochs=self.epochs)
        self._epoch = 0
        self._seconds = 0.0
        self._best: dict[str, float] = {}
        self._value = math.nan

    def fit(self) -> RunResult:
        """Train all epochs (the remaining ones, after :meth:`resume`), evaluating after each."""
        main = self.is_main
        batches = sum(self._batches(epoch) for epoch in range(self.epochs))
        done = sum(self._batches(epoch) for epoch in range(self._epoch))
        with RunLog(self.out, batches, done=done, epoch=self._epoch, active=main, console=self._console) as log:
            log.say(self._announcement())
            if self._epoch == 0:
                self._save()  # so that a run interrupted at once can go on too
            while self._epoch < self.epochs:
                self._train_epoch(log)
        result = self.result()
        if self.out is not None and main:
            result.to_json(self.out / "result.json")
        return result

    def resume(self) -> None:
        """Go on from the newest checkpoint of ``out``.

        Raises:
            RunError: there is none, or it does not fit.
        """
        if self.out is None:
            raise ConfigError("a Trainer without a folder has nothing to resume from: give out=...")
        checkpoint = load_checkpoint(self.out, self.model)
        self._optimizer.load_state_dict(checkpoint.tensors["optimizer"])
        self._scheduler.load_state_dict(checkpoint.tensors["scheduler"])
        if self._accelerator.scaler is not None:
            self._accelerator.scaler.load_state_dict(checkpoint.tensors["scaler"])
        self.engine.load_state_dict(checkpoint.state["engine"])
        self._epoch = checkpoint.epoch
        self._seconds = checkpoint.state["seconds"]
        self._best = dict(checkpoint.state["best"])
        self._value = math.nan if checkpoint.state["value"] is None else checkpoint.state["value"]
        states = checkpoint.tensors["random"]
        _set_random_state(states[self._accelerator.process_index % len(states)])

    def evaluate(self) -> tuple[float, float]:
        """Mean test loss and the objective's measure on the test samples."""
        self._wrapped.eval()
        meter = self.objective.meter().to(self._accelerator.device)
        losses: list[Tensor] = []
        with torch.no_grad():
            for inputs, targets in self._test:
                logits = self._forward(inputs)
                logits, targets = self._accelerator.gather_for_metrics((logits, targets))
                losses.append(self.objective.loss(logits, targets) * len(targets))
                meter.update(logits, targets)
        return float(torch.stack(losses).sum()) / len(self.data.test), self.objective.read(meter)

    @property
    def epochs(self) -> int:
        """Epochs of the whole run; the last may be cut short by ``iterations``."""
        return epochs_of_run(self.settings, self._steps_an_epoch)

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that reports and writes."""
        return bool(self._accelerator.is_main_process)

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
        )

    def _set_up(self) -> None:
        settings, accelerator = self.settings, self._accelerator
        train = DataLoader(
            self.data.train,
            settings.batch_size,
            shuffle=True,
            collate_fn=self.data.collate,
            drop_last=len(self.data.train) >= settings.batch_size,  # batch norm fails on a last batch of one
        )
        test = DataLoader(self.data.test, settings.batch_size, collate_fn=self.data.collate)
        module = torch.compile(self.model) if settings.compile else self.model
        optimizer = make_optimizer(self.model, settings, self.data.task)
        self._wrapped, self._optimizer, self._train, self._test = accelerator.prepare(module, optimizer, train, test)
        if len(self._train) == 0:
            raise DataError(
                f"{self.data.name} has too few samples for batches of {settings.batch_size}: make them smaller"
            )
        self._steps_an_epoch = steps = math.ceil(len(self._train) / settings.accumulate)
        self._scheduler = LambdaLR(optimizer, lambda step: lr_factor(settings, step, steps))

    def _batches(self, epoch: int) -> int:
        """Batches of an epoch, counted from 0."""
        steps = steps_of_run(self.settings, self._steps_an_epoch) - epoch * self._steps_an_epoch
        return min(len(self._train), steps * self.settings.accumulate)

    def _train_epoch(self, log: RunLog) -> None:
        started = time.perf_counter()
        self._wrapped.train()
        self._train.set_epoch(self._epoch)
        rate = float(self._scheduler.get_last_lr()[0])
        batches = self._batches(self._epoch)
        for index, (inputs, targets) in enumerate(islice(self._train, batches)):
            with self._accelerator.accumulate(self._wrapped):
                loss = self.objective.loss(self._forward(inputs), targets)
                self._accelerator.backward(self.engine.loss(loss))
                self._optimizer.step()
                if self._accelerator.sync_gradients:
                    self._scheduler.step()
                self._optimizer.zero_grad()
            log.step(1, self._glance(loss) if index % _STEPS_BETWEEN_LOOKS == 0 else None)
        change = self.engine.end_epoch()
        self._epoch += 1
        test_loss, self._value = self.evaluate()
        if self.objective.better(self._value, self._best.get("value")):
            macs = self.engine.ledger.total_macs
            self._best = {"value": self._value, "epoch": self._epoch, "macs": macs}
        self._seconds += time.perf_counter() - started
        self._report(log, test_loss, rate)
        if change is not None:
            log.say(f"  {change}")
        self._save()

    def _forward(self, inputs: Tensor) -> Tensor:
        named = {} if self._input_name is None else {self._input_name: inputs}
        return self.objective.logits(self._wrapped(**named) if named else self._wrapped(inputs))

    def _glance(self, loss: Tensor) -> str:
        """A line for the progress bar; stops a run that diverged (alone: others would wait for this process)."""
        if self._accelerator.num_processes == 1:
            self.engine.check_finite()
        cp = 100 * float(self.model.cost.cp.detach())
        return (
            f"epoch {self._epoch + 1}/{self.epochs} stage {self.engine.stage + 1}/{len(self.engine.levels)} "
            f"loss {float(loss.detach()):.3f} cp {cp:.2f} %"
        )

    def _announcement(self) -> str:
        levels = " / ".join(str(level) for level in self.engine.levels)
        stages = f"stages {levels}{'' if self.model.config.scheduled else ' % cp'}"
        return (
            f"{self.label}: {type(self.model.restore()).__name__}, {self.model.macs:,} forward MACs a sample, on "
            f"{self.data.name}; {stages if self.model.config.method != 'float' else 'float'}; "
            f"{self._accelerator.device}" + (f"; run folder {self.out}" if self.out is not None else "")
        )

    def _report(self, log: RunLog, test_loss: float, rate: float) -> None:
        row = self.engine.ledger.rows[-1]
        metric = self.objective.metric
        log.say(
            f"epoch {row.epoch:3d}  stage {row.stage + 1} ({row.level})  loss {row.loss:.4f}  "
            f"cp {100 * row.cp:.2f} %  cp_total {100 * row.cp_total:.2f} %  test {metric} {self._value:.2f}"
        )
        spent = {"lr": rate, "total_macs": self.engine.ledger.total_macs, "seconds": self._seconds}
        log.epoch(asdict(row) | {"test_loss": test_loss, f"test_{metric}": self._value} | spent)

    def _save(self) -> None:
        from accelerate.utils import gather_object

        if self.out is None:
            return
        random = gather_object([_random_state()])  # each process draws its own noise
        if not self._accelerator.is_main_process:
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
        save_checkpoint(self.out, self.model, Checkpoint(self._epoch, state, tensors))


def _accelerator(settings: TrainSettings) -> Accelerator:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    set_seed(settings.seed)
    try:
        accelerator = Accelerator(
            cpu=settings.device == "cpu",
            mixed_precision=settings.mixed_precision,
            gradient_accumulation_steps=settings.accumulate,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=settings.seed),
        )
    except ValueError as error:
        raise ConfigError(f"accelerate refuses mixed_precision={settings.mixed_precision!r}: {error}") from error
    if settings.device not in ("auto", accelerator.device.type):
        raise ConfigError(f"device={settings.device!r} is not there; accelerate finds {accelerator.device.type!r}")
    return accelerator


def _random_state() -> dict[str, Any]:
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
