"""FracTrain inside timm's training tasks, which compute the loss; all other parts of timm work unchanged."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fractrain_fx.engine import Engine, StageChange
from fractrain_fx.integrations.find import model_in

try:
    from timm.task import ClassificationTask
except ImportError as error:
    raise ImportError(
        "this timm has no training tasks (timm.task): upgrade timm, or write engine.loss(criterion(output, target)) in "
        "your own loop, which does not need fractrain_fx.integrations"
    ) from error

__all__ = ["FracTrainTask", "FracTrainTaskMixin"]

_KEY = "fractrain_fx"  # key of the engine's state in the task's state


class FracTrainTaskMixin:
    """Adds the cost term to the loss of a timm task: ``class MyTask(FracTrainTaskMixin, LogitDistillationTask)``.

    The result of a training step has ``loss`` with the cost term, and ``task_loss``. The engine's state is part of the
    task's state, which timm's checkpoints keep.

    Args:
        accumulate: batches whose gradients make one optimizer step, if the loop divides each loss by that number.
        epochs: length of the run, for schedules that divide it; by default the configuration's.
        args, kwargs: arguments of the task, which must hold one ``FracModel``.

    Raises:
        ConfigError: the task holds no rewritten model, or several.
    """

    def __init__(self, *args: Any, accumulate: int = 1, epochs: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        task: Any = self
        self.engine = Engine(model_in(task.get_trainable_module()), accumulate=accumulate, epochs=epochs)

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        """The task's result for a batch, with the cost term in its ``loss``."""
        result: dict[str, Tensor] = super().forward(input, target)  # type: ignore[misc]
        if not self.engine.model.training:  # type: ignore[attr-defined]
            return result
        return {**result, "task_loss": result["loss"].detach(), "loss": self.engine.loss(result["loss"])}

    def end_step(self) -> StageChange | None:
        """Close an optimizer step, as ``Engine.end_step``: for stages that are counted in steps."""
        return self.engine.end_step()

    def end_epoch(self, mean_loss: float | None = None) -> StageChange | None:
        """Close the epoch, as ``Engine.end_epoch``.

        Raises:
            CostTermError: backward was not called on the ``loss`` of the results.
        """
        self.engine.require_backward("the training loop")
        return self.engine.end_epoch(mean_loss)

    def get_task_state(self, module: nn.Module | None = None, ema: bool = False) -> dict[str, Any]:
        """The task's state and the engine's; a collective within an epoch."""
        state: dict[str, Any] = super().get_task_state(module, ema)  # type: ignore[misc]
        return state if ema else {**state, _KEY: self.engine.state_dict()}

    def load_task_state(self, state: dict[str, Any] | None, *args: Any, **kwargs: Any) -> None:
        """Continue from what ``get_task_state`` gave."""
        rest = dict(state or {})
        engine = rest.pop(_KEY, None)
        if engine is not None:
            self.engine.load_state_dict(engine)
        super().load_task_state(rest or None, *args, **kwargs)  # type: ignore[misc]


class FracTrainTask(FracTrainTaskMixin, ClassificationTask):
    """timm's classification task with the cost term: ``FracTrainTask(fractrainify(model), criterion)``."""
