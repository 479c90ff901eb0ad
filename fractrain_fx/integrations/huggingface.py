"""FracTrain inside transformers' ``Trainer``: a mixin for those who subclass it, a callback for those who cannot.

Trainer scales losses in two ways. If it could count the labels of the optimizer step, the loss of a batch is its share
of the step's loss, and nothing divides it again. Otherwise it is the batch's mean, and Trainer divides it by the number
of batches. The cost term is added so that a step gets it as often as without accumulation. Ledger and indicator get the
mean loss.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch import Tensor, nn
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from fractrain_fx.engine import Engine
from fractrain_fx.engine.distributed import world_size
from fractrain_fx.errors import ConfigError, CostTermError
from fractrain_fx.integrations.hf_face import Labels, face_of, frac_model_of, labels_of
from fractrain_fx.integrations.hf_steering import Steering, kept_values, refuse_fsdp
from fractrain_fx.model import FracModel
from fractrain_fx.numerics import Watch

__all__ = ["FracTrainCallback", "FracTrainMixin", "WatchCallback"]

_WATCHED = "fractrain_fx.numerics"  # key of the watch's state in trainer_state.json


class FracTrainMixin:
    """Makes a ``Trainer`` train a ``FracModel``: ``class MyTrainer(FracTrainMixin, Trainer)``.

    The cost term is added in ``compute_loss``, whatever computes the loss (the model, ``compute_loss_func``, label
    smoothing, a base class). Logs get ``task_loss``, ``cost_loss``, ``cp_percent``, ``cp_total_percent`` and ``stage``;
    checkpoints hold the files of ``FracModel.save_pretrained`` and the engine's state. ``self.model`` is the rewritten
    model as an instance of the original's class.

    Args:
        model: a rewritten model, or ``None`` if ``model_init`` makes it.
        stage_steps: optimizer steps after which an epoch of the ledger ends and the stage may change; ``None``: at each
            epoch, or as the schedule's ``every`` says.
        args, kwargs: arguments of ``Trainer``.

    Raises:
        ConfigError: the model was not rewritten or is sharded, or Trainer is to shard it, or the bases are in the wrong
            order.
        CostTermError: while training, if a subclass leaves the cost term out.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        bases = cls.__mro__
        if Trainer in bases and bases.index(Trainer) < bases.index(FracTrainMixin):
            raise ConfigError(
                f"in {cls.__name__} Trainer comes before FracTrainMixin, whose compute_loss would never be called: "
                f"write class {cls.__name__}(FracTrainMixin, Trainer)"
            )

    def __init__(self, model: Any = None, *args: Any, stage_steps: int | None = None, **kwargs: Any) -> None:
        refuse_fsdp(kwargs.get("args", args[0] if args else None))
        self._steering = Steering(stage_steps)
        self._steering.culprit = type(self).__name__
        face = None if model is None else face_of(self._steering.steer(model))
        super().__init__(face, *args, **kwargs)  # type: ignore[call-arg]
        trainer: Any = self
        trainer.add_callback(self._steering)
        callbacks = trainer.callback_handler.callbacks  # before those that print, which then see its words
        prints = [isinstance(callback, PrinterCallback | ProgressCallback) for callback in callbacks]
        callbacks.insert(prints.index(True) if any(prints) else len(callbacks), callbacks.pop())

    @property
    def engine(self) -> Engine:
        """The engine: stage, ledger, and ``loss`` for a ``compute_loss`` of your own.

        If the schedule divides a run whose length only Trainer knows, it exists from the beginning of training on.
        """
        return self._steering.engine

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Make the model of a run with ``model_init``, which must return a rewritten model."""
        model = super().call_model_init(trial)  # type: ignore[misc]
        return face_of(self._steering.steer(model))

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Trainer's loss plus the cost term."""
        trainer: Any = self
        original = self._steering.frac_model._state.original
        labels = labels_of(original, inputs, num_items_in_batch)  # before the call, which may remove them
        loss, outputs = super().compute_loss(  # type: ignore[misc]
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if model.training:
            scaled = self._is_share(num_items_in_batch)
            mean, number = loss / self._over_processes(num_items_in_batch), None
            if scaled and labels is not None:
                mean, number = mean / labels.share.clamp(min=1e-12), labels.number
            weight = 1 if scaled else trainer.current_gradient_accumulation_steps
            loss = self._steering.add_cost(loss, mean, weight, number)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Trainer's log, with the costs of the steps since the last log."""
        if "loss" in logs:
            logs.update(self._steering.read())
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _is_share(self, num_items_in_batch: Any) -> bool:
        """Whether ``Trainer.training_step`` treats the loss as the batch's share of the step's, undivided."""
        trainer: Any = self
        scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if scaled is not None:
            return bool(scaled)
        counted = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
        return bool(counted or trainer.compute_loss_func is not None)

    def _over_processes(self, num_items_in_batch: Any) -> int:
        """The factor of ``Trainer.compute_loss`` if labels are counted over all processes."""
        trainer: Any = self
        averages = trainer.args.average_tokens_across_devices and num_items_in_batch is not None
        if averages and (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func):
            return int(trainer.accelerator.num_processes)
        return 1


class FracTrainCallback(Steering):
    """For a ``Trainer`` that cannot be subclassed: ``Trainer(model=callback.model, callbacks=[callback])``.

    ``callback.model`` is the rewritten model as an instance of the original's class; in training its loss includes the
    cost term. Reporting integrations (TensorBoard, ...) that Trainer calls before other callbacks do not see the added
    numbers; ``state.log_history``, the printed logs and checkpoints have them.

    Args:
        model: a rewritten model that was recorded with its labels.
        stage_steps: optimizer steps after which an epoch of the ledger ends and the stage may change; ``None``: at each
            epoch, or as the schedule's ``every`` says.

    Raises:
        CostTermError: while training, if Trainer takes its loss from elsewhere (``compute_loss_func``, label
            smoothing, a ``compute_loss`` of its own): use :class:`FracTrainMixin` then.
    """

    def __init__(self, model: FracModel, *, stage_steps: int | None = None) -> None:
        super().__init__(stage_steps)
        self.culprit = "Trainer takes its loss from elsewhere than the model's output, and"
        self.model = face_of(self.steer(model), self._add_cost)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        if (model := kwargs.get("model")) is not self.model:
            raise ConfigError(
                f"Trainer trains a {type(model).__name__} and not callback.model, which adds the cost term: "
                "write Trainer(model=callback.model, callbacks=[callback])"
            )
        self._args = args

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_step_begin(args, state, control, **kwargs)
        self._batches_of_step, loader = args.gradient_accumulation_steps, kwargs.get("train_dataloader")
        if isinstance(loader, Sized):  # the last step of an epoch has the batches that are left
            steps, left = divmod(len(loader), args.gradient_accumulation_steps)
            if left and state.global_step % (steps + 1) == steps:
                self._batches_of_step = left

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        if "loss" in logs:
            added = self.read()
            logs.update(added)
            state.log_history[-1].update(added)
        super().on_log(args, state, control, **kwargs)

    def _add_cost(self, loss: Tensor, mean: Tensor, labels: Labels | None) -> Tensor:
        if labels is None:
            return self.add_cost(loss, mean, self._batches_of_step)
        # Trainer multiplies a counted loss, and with it the term, by the number of processes.
        weight = 1 / world_size() if self._args.average_tokens_across_devices else 1
        return self.add_cost(loss, mean, weight, labels.number)

    def _require_cost(self) -> None:
        if self.engine.steps == self._batches:
            raise CostTermError(
                "the model gave Trainer no loss to add the cost term to (compute_loss_func and label smoothing keep "
                "the labels from it): use class MyTrainer(FracTrainMixin, Trainer) instead of the callback"
            )
        super()._require_cost()


class WatchCallback(TrainerCallback):
    """Watches the numbers of a training, by :func:`fractrain_fx.numerics.watch`.

    A resumed training continues the count of steps, and drops the lines of those that it trains again.

    Args:
        options: ``every``, ``as_if`` and ``out`` of ``watch``; ``out`` is Trainer's ``output_dir`` by default.

    Attributes:
        watched: the watched steps; ``None`` before training begins.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.watched: Watch | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        if self.watched is not None:  # Trainer does not tell callbacks of an exception
            self.watched.close()
        done = kept_values(state).get(_WATCHED, {}).get("steps")
        frac_model = frac_model_of(model)
        self.watched = Watch(frac_model, **{"out": args.output_dir} | self._options, done=done, run=state)
        self.watched.__enter__()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.watched is not None:
            kept_values(state)[_WATCHED] = {"steps": self.watched.steps}

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.watched is not None:
            self.watched.close()
