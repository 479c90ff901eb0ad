"""FracTrain inside transformers' ``Trainer``: a mixin for those who subclass it, a callback for those who cannot.

Trainer scales losses in two ways. Where it could count the labels of the optimizer step, the loss of a batch is its
share of the step's loss, and nothing divides it again; elsewhere it is the batch's mean, and Trainer divides it by the
number of batches. The cost term is added so that a step feels it as often as without accumulation, and ledger and
indicator see the mean.
"""

from __future__ import annotations

import logging
from typing import Any, cast

from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fractrain_fx.engine import Engine
from fractrain_fx.engine.distributed import sum_over_ranks, world_size
from fractrain_fx.engine.meter import EpochMeter
from fractrain_fx.errors import ConfigError, CostTermError, InputError, RunError
from fractrain_fx.integrations.hf_face import face_of, share_of
from fractrain_fx.model import FracModel

__all__ = ["FracTrainCallback", "FracTrainMixin"]

_KEY = "fractrain_fx"  # of the engine's state in trainer_state.json
_log = logging.getLogger(__name__)


class _Steering(TrainerCallback):
    """Stages, state and what the logs show of one engine."""

    def __init__(self, stage_steps: int | None) -> None:
        if stage_steps is not None and stage_steps < 1:
            raise ConfigError(f"stage_steps={stage_steps} must be at least 1 optimizer step, or None for epochs")
        self.stage_steps = stage_steps
        self.culprit = "this Trainer"
        self._engine: Engine | None = None
        self._cost: Tensor | None = None
        self._batches = self._stage = 0
        self._open_window()

    @property
    def engine(self) -> Engine:
        """The engine that this Trainer drives."""
        if self._engine is None:
            raise InputError("there is no model yet: Trainer makes it with model_init when it is built")
        return self._engine

    def steer(self, model: Any) -> FracModel:
        """Take a rewritten model, with an engine of its own."""
        if not isinstance(model, FracModel):
            raise ConfigError(
                f"Trainer got a {type(model).__name__}, which has no fractional precision to train: "
                "pass fractrainify(model, example_kwargs=one batch with its labels)"
            )
        self._engine = Engine(model)
        return model

    def add_cost(self, loss: Tensor, mean: Tensor, weight: float) -> Tensor:
        """The loss with the cost term, of which the optimizer step feels one ``weight``-th."""
        total = self.engine.loss(loss, mean=mean, weight=weight)
        model = self.engine.model
        self._window.add(mean, model.cost, model.batch)
        self._stage = self.engine.stage
        term = (total.detach() - loss.detach()) / weight
        self._cost = term if self._cost is None else self._cost + term
        return total

    def read(self) -> dict[str, float]:
        """Means since the last call: task loss, cost loss, shares of cost, and the last step's stage; collective."""
        if self._cost is None:
            return {}
        means = self._window.read()
        cost = float(sum_over_ranks(self._cost)) / world_size() / max(self._steps, 1)
        self._open_window()
        shares = {name: means.shares[name] for name in ("cp", "cp_total")}
        return {"task_loss": means.loss, "cost_loss": cost, **shares, "stage": self._stage}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if args.n_gpu > 1:
            raise ConfigError(
                f"Trainer would spread the batch over {args.n_gpu} GPUs of one process, which a recorded graph cannot "
                "follow: start one process a GPU (accelerate launch, torchrun), or show it one (CUDA_VISIBLE_DEVICES)"
            )
        self.engine.accumulate = args.gradient_accumulation_steps
        if state.global_step == 0:
            return
        kept = _kept(state).get(_KEY)
        if kept is None or kept["step"] != state.global_step:
            raise RunError(
                f"the checkpoint of step {state.global_step} holds no state of FracTrain (stage, ledger): it was "
                "written without it, or cut short. Resume from an earlier one, or start anew"
            )
        self.engine.load_state_dict(kept["engine"])

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.engine.start_step()
        self._batches = self.engine.steps

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._require_cost()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._require_cost()
        self.engine.require_backward(self.culprit)
        self._steps += 1
        # At the last step and not in on_epoch_end, so that a checkpoint of this step has the epoch closed.
        ends = state.epoch == int(state.epoch) if self.stage_steps is None else not state.global_step % self.stage_steps
        if ends:
            self._end_epoch()
        self._keep(state, control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.stage_steps is None and self.engine.steps:  # cut short, or of unknown length
            self._end_epoch()
        self._keep(state, control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Mend a checkpoint that another callback asked for after this one had looked."""
        kept = _kept(state).get(_KEY)
        if kept is not None and kept["step"] == state.global_step:
            return
        self._take(state)
        path = f"{args.output_dir}/checkpoint-{state.global_step}/trainer_state.json"
        if args.should_save and not state.is_hyper_param_search:  # trials have other folders, and are not resumed
            state.save_to_json(path)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.engine.steps:
            self._end_epoch()

    def _end_epoch(self) -> None:
        change = self.engine.end_epoch()
        if change is not None:
            _log.info("%s", change)

    def _keep(self, state: TrainerState, control: TrainerControl) -> None:
        if control.should_save or control.should_evaluate:  # an evaluation may find the best model, which is saved
            self._take(state)

    def _take(self, state: TrainerState) -> None:
        _kept(state)[_KEY] = {"step": state.global_step, "engine": self.engine.state_dict()}

    def _require_cost(self) -> None:
        if self.engine.steps == self._batches:
            raise CostTermError(
                f"{self.culprit} trained a batch without the cost term: return super().compute_loss(...) from "
                "compute_loss, or self.engine.loss(loss), with FracTrainMixin before Trainer among the bases"
            )
        self._batches = self.engine.steps

    def _open_window(self) -> None:
        self._window = EpochMeter()
        self._cost = None
        self._steps = 0


def _kept(state: TrainerState) -> dict[str, Any]:
    """What trainer_state.json keeps of callbacks: plain values by name, whatever the annotation says."""
    kept: Any = state.stateful_callbacks
    return cast(dict[str, Any], kept)


class FracTrainMixin:
    """Makes a ``Trainer`` train a ``FracModel``: ``class MyTrainer(FracTrainMixin, Trainer)``.

    The cost term is added in ``compute_loss``, whatever computes the loss (the model, ``compute_loss_func``, label
    smoothing, a base class). Logs get ``task_loss``, ``cost_loss``, ``cp``, ``cp_total`` (shares 0..1) and ``stage``;
    checkpoints hold what ``FracModel.save_pretrained`` writes and the engine's state. ``self.model`` is the rewritten
    model behind the original's class.

    Args:
        model: what ``fractrainify`` made, or ``None`` where ``model_init`` makes it.
        stage_steps: optimizer steps after which the stage may change; ``None``: at each epoch.
        args, kwargs: those of ``Trainer``.

    Raises:
        ConfigError: the model was not rewritten, or the bases stand in the wrong order.
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
        self._steering = _Steering(stage_steps)
        self._steering.culprit = type(self).__name__
        face = None if model is None else face_of(self._steering.steer(model))
        super().__init__(face, *args, **kwargs)  # type: ignore[call-arg]
        self.add_callback(self._steering)  # type: ignore[attr-defined]

    @property
    def engine(self) -> Engine:
        """The engine: stage, ledger, and ``loss`` for a ``compute_loss`` of your own."""
        return self._steering.engine

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Make the model of a run with ``model_init``, which must return a rewritten one."""
        made = super().call_model_init(trial)  # type: ignore[misc]
        return face_of(self._steering.steer(made))

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Trainer's loss plus the cost term."""
        trainer: Any = self
        original = self._steering.engine.model.restore()  # type: ignore[attr-defined]
        share = share_of(original, inputs, num_items_in_batch)  # now: the labels may be popped
        loss, outputs = super().compute_loss(  # type: ignore[misc]
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if model.training:
            scaled = self._is_share(num_items_in_batch)
            mean = loss / self._over_processes(num_items_in_batch)
            if scaled and share is not None:
                mean = mean / share.clamp(min=1e-12)
            weight = 1 if scaled else trainer.current_gradient_accumulation_steps
            loss = self._steering.add_cost(loss, mean, weight)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Trainer's log, with what the steps since the last one cost."""
        if "loss" in logs:
            logs.update(self._steering.read())
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _is_share(self, num_items_in_batch: Any) -> bool:
        """Whether ``Trainer.training_step`` takes the loss for the batch's share of the step's, and does not divide."""
        trainer: Any = self
        told = getattr(trainer, "loss_is_scaled_for_ga", None)
        if told is not None:
            return bool(told)
        counted = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
        return bool(counted or trainer.compute_loss_func is not None)

    def _over_processes(self, num_items_in_batch: Any) -> int:
        """What ``Trainer.compute_loss`` multiplies by where labels are counted over all processes."""
        trainer: Any = self
        averages = trainer.args.average_tokens_across_devices and num_items_in_batch is not None
        if averages and (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func):
            return int(trainer.accelerator.num_processes)
        return 1


class FracTrainCallback(_Steering):
    """For a ``Trainer`` that cannot be subclassed: ``Trainer(model=callback.model, callbacks=[callback])``.

    ``callback.model`` is the rewritten model behind the original's class; in training its own loss holds the cost
    term. Reporting integrations (TensorBoard, ...) that Trainer calls before other callbacks do not see the added
    numbers; ``state.log_history``, the printed logs and checkpoints have them.

    Args:
        model: what ``fractrainify`` made, recorded with its labels.
        stage_steps: optimizer steps after which the stage may change; ``None``: at each epoch.

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

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        if "loss" in logs:
            added = self.read()
            logs.update(added)
            state.log_history[-1].update(added)

    def _add_cost(self, loss: Tensor, mean: Tensor, counted: bool) -> Tensor:
        if not counted:
            return self.add_cost(loss, mean, self._args.gradient_accumulation_steps)
        # Trainer multiplies a counted loss, and with it the term, by the number of processes.
        return self.add_cost(loss, mean, 1 / world_size() if self._args.average_tokens_across_devices else 1)

    def _require_cost(self) -> None:
        if self.engine.steps == self._batches:
            raise CostTermError(
                "the model gave Trainer no loss to add the cost term to (compute_loss_func and label smoothing keep "
                "the labels from it): use class MyTrainer(FracTrainMixin, Trainer) instead of the callback"
            )
        super()._require_cost()
