"""FracTrain inside Lightning: a callback that adds the cost term to the result of ``training_step``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fractrain_fx.engine import Engine
from fractrain_fx.errors import ConfigError, CostTermError, require_packages
from fractrain_fx.integrations.find import model_in
from fractrain_fx.integrations.length import check_stage_steps, engine_for
from fractrain_fx.numerics import Watch

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities import rank_zero_info
except ModuleNotFoundError:
    require_packages("fractrain_fx.integrations.lightning", "lightning")
    raise

__all__ = ["FracTrainCallback", "WatchCallback"]

_RESTORE = "fractrain_fx_restore"  # attribute of a wrapped training_step: the function that takes the wrapper off


class FracTrainCallback(Callback):
    """Adds the cost term, moves the stage, logs costs, and keeps the engine's state in Lightning's checkpoints.

    The module needs no change if ``training_step`` returns its loss (a tensor, or a mapping with ``"loss"``). A module
    may also make its engine itself, call ``engine.loss`` on its loss, and pass the engine to this callback; with manual
    optimization it must.

    Logged are ``cp_percent``, ``cp_total_percent``, ``task_loss``, ``cost_loss`` (if this callback added the term) and
    ``stage``, from 1.

    Args:
        engine: the engine that the module calls; by default one is made for the module's ``FracModel``.
        stage_steps: optimizer steps after which an epoch of the ledger ends and the stage may change; ``None``: at each
            epoch, or as the schedule's ``every`` says.

    Raises:
        ConfigError: when training starts, if the module has no ``FracModel``, or several.
        CostTermError: while training, if a batch was trained without the cost term.
    """

    def __init__(self, engine: Engine | None = None, *, stage_steps: int | None = None) -> None:
        check_stage_steps(stage_steps)
        self._engine = engine
        self._stage_steps = stage_steps
        self._state: Mapping[str, Any] | None = None
        self._epochs: int | None = None
        self._step = 0
        self._values: dict[str, Any] = {}

    @property
    def engine(self) -> Engine:
        """The engine; if none was passed, it exists after ``fit`` has begun."""
        if self._engine is None:
            raise ConfigError("the engine is made when trainer.fit begins: read it after that, or pass one")
        return self._engine

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._epochs = trainer.max_epochs  # before StochasticWeightAveraging adds its pass

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = model_in(pl_module) if self._engine is None else self._engine.model
        check_stage_steps(self._stage_steps, model.frac_config.schedule.every)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = model_in(pl_module) if self._engine is None else self._engine.model
        epochs, steps = self._length(trainer, pl_module)
        self._engine = engine_for(model, self._engine, stage_steps=self._stage_steps, epochs=epochs, steps=steps)
        if self._state is not None:
            self.engine.load_state_dict(self._state)
            self._state = None
        self.engine.accumulate = trainer.accumulate_grad_batches
        self.engine.abandon_step()
        self._step = trainer.global_step
        self._wrap(trainer, pl_module)

    def _length(self, trainer: Trainer, module: LightningModule) -> tuple[int | None, int | None]:
        """Epochs of the run and, where Lightning counts them as this callback does, optimizer steps."""
        epochs, steps = self._epochs, trainer.max_steps
        epochs = None if epochs in (None, -1) else epochs
        batches = trainer.num_training_batches
        if math.isfinite(batches):
            per_epoch = math.ceil(batches / trainer.accumulate_grad_batches)
            epochs = min(filter(None, (epochs, math.ceil(steps / per_epoch) if steps > 0 else None)), default=None)
            steps = min(filter(None, (epochs and epochs * per_epoch, steps if steps > 0 else None)), default=-1)
        return epochs, steps if steps > 0 and module.automatic_optimization else None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _unwrap(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        _unwrap(pl_module)  # Lightning calls no teardown after an exception

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if _only_measures(trainer):
            return
        self.engine.accumulate = trainer.accumulate_grad_batches  # a scheduler may have changed it
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.engine.start_step()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.engine.require_backward(f"{type(pl_module).__name__}.training_step")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if _only_measures(trainer):
            return
        if self._values:
            pl_module.log_dict(self._values, batch_size=self.engine.model.training_forward.batch)
        stepped, self._step = trainer.global_step != self._step, trainer.global_step
        if stepped:
            self.engine.end_step()
        if self._stage_steps is not None:
            if stepped and not trainer.global_step % self._stage_steps:
                self.engine.end_epoch()
        elif trainer.is_last_batch and self.engine.steps:
            # Not in on_train_epoch_end, which comes after a checkpoint that validation makes.
            self.engine.end_epoch()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._stage_steps is None and self.engine.steps:  # cut short
            self.engine.end_epoch()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.engine.steps:
            self.engine.end_epoch()
        if len(self.engine.levels) > 1:
            rank_zero_info(self.engine.ledger.stages)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._engine is None else {"engine": self._engine.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict.get("engine")

    def _wrap(self, trainer: Trainer, module: LightningModule) -> None:
        """Wrap ``training_step`` of this module (not of its class) so that its loss gets the cost term."""
        _unwrap(module)
        step = module.training_step
        on_instance = "training_step" in vars(module)

        def training_step(*args: Any, **kwargs: Any) -> Any:
            if _only_measures(trainer):
                with self.engine.paused():
                    return step(*args, **kwargs)
            before = self.engine.steps
            output = step(*args, **kwargs)
            added = self.engine.steps - before
            if output is None and module.automatic_optimization and not added and self._values:
                return None  # Lightning skips such a batch, and says so
            self._values = {}
            if not added:
                output = self._add_cost(module, output)
            cost = self.engine.model.training_forward.cost
            costs = {"cp_percent": 100 * cost.cp.detach(), "cp_total_percent": 100 * cost.cp_total.detach()}
            self._values |= {**costs, "stage": float(self.engine.stage + 1)}
            return output

        def restore() -> None:
            if on_instance:
                module.training_step = step  # type: ignore[method-assign]
            else:
                del module.training_step

        setattr(training_step, _RESTORE, restore)
        module.training_step = training_step  # type: ignore[method-assign]

    def _add_cost(self, module: LightningModule, output: Any) -> Any:
        name = type(module).__name__
        task = output.get("loss") if isinstance(output, Mapping) else output
        if not module.automatic_optimization or not isinstance(task, Tensor):
            raise CostTermError(
                f"{name}.training_step neither returned its loss nor called engine.loss, so the cost term cannot be "
                "added: return the loss (a tensor, or a dict with 'loss'), or write self.engine = Engine(self.model) "
                "and loss = self.engine.loss(loss) before its backward, and pass FracTrainCallback(module.engine)"
            )
        loss = self.engine.loss(task)
        share = (loss - task).detach() / self.engine.accumulate
        self._values = {"task_loss": task.detach(), "cost_loss": share}
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss


class WatchCallback(Callback):
    """Watches the numbers of a training (:func:`fractrain_fx.numerics.watch`), beside ``FracTrainCallback``.

    A resumed training continues the count of steps, and drops the lines of those that it trains again.

    Args:
        options: ``every``, ``as_if`` and ``out`` of ``watch``; ``out`` is Lightning's ``default_root_dir`` by default.

    Attributes:
        watched: the watched steps; ``None`` before training begins.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._done: int | None = None
        self.watched: Watch | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()
        options = {"out": trainer.default_root_dir} | self._options
        self.watched = Watch(model_in(pl_module), **options, done=self._done, run=trainer)
        self._done = None
        self.watched.__enter__()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.watched is None else {"steps": self.watched.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._done = state_dict["steps"]

    def _close(self) -> None:
        if self.watched is not None:
            self.watched.close()


def _unwrap(module: LightningModule | None) -> None:
    """Take the wrapper off ``training_step``, also that of an earlier fit that could not."""
    restore = getattr(getattr(module, "training_step", None), _RESTORE, None)
    if restore is not None:
        restore()


def _only_measures(trainer: Trainer) -> bool:
    """Whether this epoch trains nothing: StochasticWeightAveraging's pass, which measures for the norms."""
    return bool(getattr(trainer.fit_loop, "_skip_backward", False))
