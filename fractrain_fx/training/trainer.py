"""The training loop of one model on one task. accelerate handles devices and processes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor

from fractrain_fx.engine import Engine
from fractrain_fx.engine.dependence import ChoiceMeter
from fractrain_fx.engine.distributed import LOST, is_lost_process, sum_over_ranks
from fractrain_fx.errors import ConfigError, NonFiniteLossError, RunError
from fractrain_fx.hardware.run_cost import StepPrices, run_cost
from fractrain_fx.summary import summarize
from fractrain_fx.summary.text import LOUD
from fractrain_fx.training.data import DataSet
from fractrain_fx.training.folder.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint, save_checkpoint
from fractrain_fx.training.folder.held import HeldFolder, hold, hold_together, holds_run
from fractrain_fx.training.folder.schema import STATE, TENSORS, reading
from fractrain_fx.training.interrupt import Interrupt
from fractrain_fx.training.log import RunLog
from fractrain_fx.training.log.alarm import Alarm
from fractrain_fx.training.log.extremes import Extremes, write_samples
from fractrain_fx.training.log.messages import EXPLANATION, StepReport, announcement, bits_line, epoch_bits, epoch_line
from fractrain_fx.training.log.records import RESULT, EpochRecord, Evaluation, Start
from fractrain_fx.training.log.results import Best, Progress, RunResult
from fractrain_fx.training.objective import Objective
from fractrain_fx.training.prepared import Prepared
from fractrain_fx.training.processes import require_finite, share_buffers
from fractrain_fx.training.settings import TrainSettings, identity

if TYPE_CHECKING:
    from fractrain_fx.model import FracModel

__all__ = ["Trainer"]

_STEPS_BETWEEN_REPORTS = 10  # steps between reads of the loss, each of which waits for the device


class Trainer:
    """Trains a ``FracModel`` on a data set and reports its cost.

    A checkpoint is written before the first epoch and after each epoch. A stopped run continues from the end of its
    last whole epoch, with the same numbers as without the stop (bit for bit on a CPU).

    Args:
        model: a rewritten model.
        data: training and test samples.
        settings: settings of the loop.
        out: folder for checkpoints, metrics and TensorBoard; ``None`` writes nothing.
        label: name of this run in tables; by default the method.
        input_name: keyword of the model's input; ``None``: its first positional argument.
        console: prints the reports.
        config: settings that a checkpoint must agree with; by default those of the loop and the model.

    Attributes:
        watched_every: batches from one watched step to the next (``numerics.jsonl``); ``None`` watches none.
        held: keeps other processes from ``out`` until :meth:`fit` ends.

    Raises:
        ConfigError: the device does not exist, or accelerate already runs with other settings in this process.
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
        self.label = label or model.frac_config.method
        self.objective = Objective.of(data)
        self.input_name = input_name
        self._console = console
        self._prepared = Prepared(model, data, self.settings)
        self._accelerator, self._length = self._prepared.accelerator, self._prepared.length
        config = config or asdict(self.settings) | model.frac_config.to_dict()
        self._identity = identity(config, self._accelerator.num_processes)
        length, epochs = self._prepared.length_in(model.frac_config.schedule.every), self.epochs
        self.engine = Engine(model, accumulate=self.settings.accumulate, epochs=epochs, length=length)
        self.engine.expect(epochs=epochs, steps=self._length.run_steps)
        self._progress, self._interrupt = Progress(), Interrupt()
        self._alarm = Alarm(model, self.objective, input_name)
        self.watched_every: int | None = None
        self._resumed = False
        self.held: HeldFolder | None = None

    def fit(self) -> RunResult:
        """Train all epochs (the remaining ones, after :meth:`resume`), evaluating after each.

        Raises:
            NonFiniteLossError: a loss or a weight was NaN or infinite; the message names the last good checkpoint.
            RunError: ``out`` holds another run's files, another run writes there, or another process is gone.
        """
        with self._hold():
            return self._fit()

    def _hold(self) -> AbstractContextManager[object]:
        if self.out is not None and (self.held is None or self.held.released):
            self.held = hold_together(partial(hold, self.out))
        return self.held or nullcontext()

    def _fit(self) -> RunResult:
        begins = self._progress.epoch == 0 and not self._resumed
        if self.out is not None and begins and holds_run(self.out):
            lost = latest_checkpoint(self.out) is None
            way_out = "its checkpoint is gone, so move its files away" if lost else "call resume() first"
            raise RunError(f"{self.out} holds a run: {way_out}, or write to another folder")
        epoch, active = self._progress.epoch, self.is_main
        with RunLog(self.out, self._length, epoch=epoch, active=active, console=self._console) as log:
            log.say(EXPLANATION)
            if loud := summarize(self.model).loud:
                log.say(loud, LOUD)
            text = announcement(self.label, self.model, self.data.name, self.engine)
            log.say(f"{text}; {self._prepared.place}" + ("" if self.out is None else f"; run folder {self.out}"))
            if (rounding := self.model._state.rounding).reason:
                log.say(str(rounding))
            if begins:
                self._save()  # so that a run that is interrupted at once can continue too
            try:
                with self._interrupt, log.watching(self._prepared.module, self.watched_every):
                    while self._progress.epoch < self.epochs:
                        self._train_epoch(log)
            except NonFiniteLossError as error:
                raise NonFiniteLossError(f"{error}. {self._last_good()}") from error
            except RuntimeError as error:
                if not is_lost_process(error.__cause__ or error):
                    raise
                raise RunError(f"{LOST}. {self._last_good()}") from error
            log.say(self.engine.ledger.stages)
        result = self.result()
        if self.out is not None and self.is_main:
            result.to_json(self.out / RESULT)
        return result

    def resume(self) -> None:
        """Continue from the newest checkpoint of ``out``.

        Raises:
            RunError: there is no checkpoint, it is damaged, or another configuration made it.
        """
        if self.out is None:
            raise ConfigError("a Trainer without a folder has nothing to resume from: give out=...")
        self._hold()
        checkpoint = load_checkpoint(self.out, self.model, self._identity)
        with reading(checkpoint.place / STATE):
            self.engine.load_state_dict(checkpoint.state["engine"])
            self._progress = Progress.from_state_dict(checkpoint.epoch, checkpoint.state)
        with reading(checkpoint.place / TENSORS):
            self._prepared.load_state_dict(checkpoint.tensors)
        self._resumed = True

    def evaluate(self) -> Evaluation:
        """Mean test loss, the objective's measure and the gates' choices over the test samples of all processes."""
        share_buffers(self.model)
        inner = self._prepared.alone  # without DDP: other processes may have a batch more or less
        inner.eval()
        choices, extremes = ChoiceMeter(), Extremes(self.model)
        sums = torch.zeros(3, device=self._accelerator.device)
        with torch.no_grad():
            for inputs, targets, counts in self._prepared.test():
                logits = self._forward(inner, inputs)
                if not counts:
                    continue
                sums += self.objective.sums(logits, targets)
                choices.add(self.model.cost.choice)
                extremes.add(inputs, self.model.cost.choice)
        return Evaluation(*self.objective.read(sum_over_ranks(sums)), choices.read(), extremes.read())

    @property
    def epochs(self) -> int:
        """Epochs of the whole run; the last may be cut short by ``iterations``."""
        return self._length.epochs

    @property
    def is_main(self) -> bool:
        """Whether this process reports and writes."""
        return bool(self._accelerator.is_main_process)

    def start(self, arguments: Sequence[str]) -> Start:
        """The record of a start or continuation of this run by the command line ``arguments``."""
        device, processes = self._accelerator.device, self._accelerator.num_processes
        return Start.now(arguments, epoch=self._progress.epoch, device=str(device), processes=processes)

    def result(self) -> RunResult:
        """The result of the run so far."""
        return RunResult.of(self.label, self.objective.metric, self.engine.ledger, self._progress, self._prices)

    @cached_property
    def _prices(self) -> StepPrices:
        return StepPrices(self.model, self.settings.batch_size)

    def _train_epoch(self, log: RunLog) -> None:
        started = time.perf_counter()
        prepared, progress, ledger = self._prepared, self._progress, self.engine.ledger
        prepared.module.train()
        rate, steps = prepared.rate, self._length.steps(progress.epoch)
        self._train_batches(log)
        self.engine.check_finite()  # waits for the device
        train_seconds, progress.epoch = time.perf_counter() - started, progress.epoch + 1
        evaluation = self.evaluate()  # in the stage that was trained
        change = self.engine.end_epoch()
        progress.value, dependence = evaluation.value, evaluation.dependence
        if self.objective.better(progress.value, None if progress.best is None else progress.best.value):
            progress.best = Best(progress.value, progress.epoch, ledger.total_macs)
        progress.seconds += time.perf_counter() - started
        row, metric = ledger.rows[-1], self.objective.metric
        bits = epoch_bits(row, self.model.frac_config)
        log.say(epoch_line(row, metric, progress.value))
        if line := bits_line(bits):
            log.say(line)
        hardware = run_cost(self._prices, [row]).total
        record = EpochRecord(
            row,
            metric,
            progress.value,
            evaluation.loss,
            lr=rate,
            total_macs=ledger.total_macs,
            seconds=progress.seconds,
            steps=steps,
            train_seconds=train_seconds,
            bitfusion_joules=hardware.joules or None,
            bitfusion_seconds=hardware.seconds or None,
            mutual_information=None if dependence is None else dependence.mean_information,
            configurations=None if dependence is None else dependence.configurations,
            commonest=None if dependence is None else dependence.commonest,
        )
        log.epoch(record.to_dict(), bits)
        if self.out is not None and self.is_main and evaluation.samples:
            write_samples(evaluation.samples, self.out)
        if change is not None:
            log.say(f"  {change}")
        self._save()

    def _train_batches(self, log: RunLog) -> None:
        prepared, epoch, processes = self._prepared, self._progress.epoch, self._accelerator.num_processes
        loader = prepared.loader.train(epoch * self._length.epoch_batches, self._length.batches(epoch))
        log.begin_epoch()
        for number, (inputs, targets) in enumerate(loader, start=1):
            self._interrupt.check()
            size, step_ends = self._length.step_of(epoch, number)
            # accelerate divides each loss by this number, and the engine takes that into account.
            self.engine.accumulate = self._accelerator.gradient_accumulation_steps = size
            with prepared.batch(step_ends=step_ends):
                loss = self.objective.loss(self._forward(prepared.module, inputs), targets)
                self._accelerator.backward(self.engine.loss(loss))
            reports = number % _STEPS_BETWEEN_REPORTS == 1 or log.due
            if reports and processes == 1:  # other processes would wait for one that stops
                self._alarm.check(self.engine, inputs, targets)
            if step_ends:
                prepared.step()
                if (change := self.engine.end_step()) is not None:
                    log.say(f"  {change}")
            log.step(len(targets) * processes)
            if reports:
                place = self._length.place(epoch, number)
                report = StepReport.at(place, self.model, self.engine, loss, prepared.rate)
                log.report(report)
                if processes == 1 and (line := self._alarm.jumped(report.loss, inputs, targets)) is not None:
                    log.say(line)

    def _forward(self, module: Any, inputs: Tensor) -> Tensor:
        named = {} if self.input_name is None else {self.input_name: inputs}
        return self.objective.logits(self._prepared.call(module, *(() if named else (inputs,)), **named))

    def _last_good(self) -> str:
        folder = None if self.out is None else latest_checkpoint(self.out)
        return "This run keeps no checkpoints" if folder is None else f"The last good checkpoint is {folder}"

    def _save(self) -> None:
        if self.out is None:
            return
        progress = self._progress
        require_finite(self.model, progress.epoch)
        tensors, weights = self._prepared.state_dict(), self._prepared.weights()
        state = {"engine": self.engine.state_dict()} | progress.state_dict()
        if self.is_main:
            save_checkpoint(self.out, weights, Checkpoint(progress.epoch, self._identity, state, tensors))
