"""Callback of transformers' Trainer that drives one engine: stages, state, and the numbers of its logs."""

from __future__ import annotations

import logging
import sys
from typing import Any, cast

from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fractrain_fx.engine import Engine, StageChange
from fractrain_fx.engine.distributed import sum_over_ranks, world_size
from fractrain_fx.engine.meter import EpochMeter
from fractrain_fx.engine.steered import note_steered, show_level
from fractrain_fx.errors import ConfigError, CostTermError, InputError, RunError
from fractrain_fx.integrations.length import check_stage_steps, engine_for, waits_for_length
from fractrain_fx.model import FracModel

__all__ = ["Steering", "kept_values", "refuse_fsdp"]

_OF_SPEED = ("_time", "_runtime", "_per_second")  # how names of metrics end that say nothing of the model
_KEY = "fractrain_fx"  # key of the engine's state in trainer_state.json
_log = logging.getLogger(__name__)


def refuse_fsdp(args: TrainingArguments | None) -> None:
    """Check that Trainer is not to shard the model."""
    if getattr(args, "fsdp", None):
        raise ConfigError(
            "TrainingArguments(fsdp=...) gathers the weights of a layer when the layer is called, and a rewritten "
            "graph does not call layers: leave it out (DistributedDataParallel), or shard by segment with "
            "fractrain_fx.distributed.fully_shard(model) in a loop of your own or "
            "fractrain train --set shard=true"
        )


class Steering(TrainerCallback):
    """Moves the stages of one engine, keeps its state in checkpoints, and logs its costs."""

    def __init__(self, stage_steps: int | None) -> None:
        check_stage_steps(stage_steps)
        self.stage_steps = stage_steps
        self.culprit = "this Trainer"
        self._engine: Engine | None = None
        self._frac_model: FracModel | None = None
        self._cost: Tensor | None = None
        self._batches = self._stage = 0
        self._level = ""
        self._open_window()

    @property
    def engine(self) -> Engine:
        """The engine that this Trainer drives."""
        config = self.frac_model.frac_config
        if self._engine is None:
            raise InputError(
                f"schedule={config.schedule.kind!r} divides the run, whose length Trainer knows when training begins: "
                "read the engine after that, or write run=RunConfig(length=...) in FracConfig"
            )
        return self._engine

    @property
    def frac_model(self) -> FracModel:
        """The rewritten model that this Trainer trains."""
        if self._frac_model is None:
            raise InputError("there is no model yet: Trainer makes it with model_init when it is built")
        return self._frac_model

    def steer(self, model: Any) -> FracModel:
        """Take a rewritten model, and make its engine if its schedule need not know how long Trainer trains."""
        if not isinstance(model, FracModel):
            raise ConfigError(
                f"Trainer got a {type(model).__name__}, which has no fractional precision to train: "
                "pass fractrainify(model, example_kwargs=one batch with its labels)"
            )
        check_stage_steps(self.stage_steps, model.frac_config.schedule.every)
        if model._state.sharding is not None:
            raise ConfigError(
                "Trainer wraps the model of several processes in DistributedDataParallel, which cannot hold shards: "
                "train a model after fractrain_fx.distributed.fully_shard in a loop of your own or with "
                "fractrain train --set shard=true, or leave fully_shard out"
            )
        self._frac_model = model
        note_steered(model)  # Trainer looks for it before training begins
        self._engine = None if waits_for_length(model) else Engine(model)
        return model

    def add_cost(self, loss: Tensor, mean: Tensor, weight: float, labels: Tensor | None = None) -> Tensor:
        """The loss with the cost term, of which the optimizer step gets one ``weight``-th.

        ``labels`` is the number of labels of the batch, if Trainer weighs losses by it.
        """
        total = self.engine.loss(loss, mean=mean, weight=weight, labels=labels)
        ran = self.engine.model.training_forward
        self._window.add(mean, ran.cost, ran.batch, labels=labels)
        self._stage, self._level = self.engine.stage, show_level(self.engine.level)
        term = (total.detach() - loss.detach()) / weight
        self._cost = term if self._cost is None else self._cost + term
        return total

    def read(self) -> dict[str, float]:
        """Means since the last call (losses, costs in per cent) and the last step's stage, from 1; a collective."""
        if self._cost is None:
            return {}
        means = self._window.read()
        cost = float(sum_over_ranks(self._cost)) / world_size() / max(self._steps, 1)
        self._open_window()
        costs = {f"{name}_percent": 100 * means.shares[name] for name in ("cp", "cp_total")}
        task = means.loss if means.weight else 0.0
        return {"task_loss": task, "cost_loss": cost, **costs, "stage": self._stage + 1}

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        refuse_fsdp(args)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if args.n_gpu > 1:
            raise ConfigError(
                f"Trainer would spread the batch over {args.n_gpu} GPUs of one process, which a recorded graph cannot "
                "follow: start one process a GPU (accelerate launch, torchrun), or show it one (CUDA_VISIBLE_DEVICES)"
            )
        epochs = None if state.num_train_epochs == sys.maxsize else state.num_train_epochs  # no end but max_steps
        self._engine = engine_for(
            self.frac_model, self._engine, stage_steps=self.stage_steps, epochs=epochs, steps=state.max_steps
        )
        self.engine.accumulate = args.gradient_accumulation_steps
        self.engine.abandon_step()
        self._open_window()
        if state.global_step == 0:
            return
        saved = kept_values(state).get(_KEY)
        if saved is None or saved["step"] != state.global_step:
            raise RunError(
                f"the checkpoint of step {state.global_step} holds no state of FracTrain (stage, ledger): it was "
                "written without FracTrain, or cut short. Resume from an earlier one, or start again"
            )
        self.engine.load_state_dict(saved["engine"])

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.engine.start_step()
        self._batches = self.engine.steps

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._require_cost()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._require_cost()
        self.engine.require_backward(self.culprit)
        self._steps += 1
        self._tell(self.engine.end_step())
        # The epoch is closed here and not in on_epoch_end, so that a checkpoint of this step has it closed.
        ends = state.epoch == int(state.epoch) if self.stage_steps is None else not state.global_step % self.stage_steps
        if ends:
            self._end_epoch()
        self._keep(state, control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.stage_steps is None and self.engine.steps:  # cut short, or of unknown length
            self._end_epoch()
        self._keep(state, control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Add the state to a checkpoint that another callback asked for after this callback had looked."""
        saved = kept_values(state).get(_KEY)
        if saved is not None and saved["step"] == state.global_step:
            return
        self._take(state)
        path = f"{args.output_dir}/checkpoint-{state.global_step}/trainer_state.json"
        if args.should_save and not state.is_hyper_param_search:  # trials have other folders and are never resumed
            state.save_to_json(path)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.engine.steps:
            self._end_epoch()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add words to what is printed and kept: the level of the stage, and at the end the stages that the run had.

        Callbacks before this one (reporting integrations, which take numbers only) do not see them.
        """
        logs = kwargs.get("logs") or {}
        words: dict[str, Any] = {}
        if "task_loss" in logs:
            words = {"level": self._level}
        elif "train_runtime" in logs and self.engine.ledger.rows and len(self.engine.levels) > 1:
            words = {"stages": self.engine.ledger.stages.removeprefix("stages: ")}
        logs.update(words)
        if words and state.log_history:
            state.log_history[-1].update(words)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the measures for the model's card."""
        metrics = (kwargs.get("metrics") or {}).items()
        self.frac_model._state.results = {
            name: float(value)
            for name, value in metrics
            if isinstance(value, int | float) and name != "epoch" and not name.endswith(_OF_SPEED)
        }

    def _end_epoch(self) -> None:
        self._tell(self.engine.end_epoch())

    def _tell(self, change: StageChange | None) -> None:
        if change is not None:
            _log.info("%s", change)

    def _keep(self, state: TrainerState, control: TrainerControl) -> None:
        if control.should_save or control.should_evaluate:  # an evaluation may save the best model
            self._take(state)

    def _take(self, state: TrainerState) -> None:
        kept_values(state)[_KEY] = {"step": state.global_step, "engine": self.engine.state_dict()}

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


def kept_values(state: TrainerState) -> dict[str, Any]:
    """The values that trainer_state.json keeps of callbacks, by name; their annotation is too narrow."""
    values: Any = state.stateful_callbacks
    return cast(dict[str, Any], values)
