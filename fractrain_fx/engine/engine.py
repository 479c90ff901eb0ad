"""The engine: adds the cost term to each loss, keeps the ledger, and moves the stage between epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from fractrain_fx.config.precision import Precision
from fractrain_fx.engine.controller import CostController
from fractrain_fx.engine.distributed import mean_over_ranks
from fractrain_fx.engine.ledger import Ledger
from fractrain_fx.engine.meter import EpochMeter, refuse_bad_step
from fractrain_fx.engine.schedules import Level, StagePlan, StageSchedule, plan_stages
from fractrain_fx.engine.steered import (
    SteeredModel,
    level_text,
    levels_of,
    note_steered,
    show_level,
    steered_model,
)
from fractrain_fx.engine.watch import LoopWatch
from fractrain_fx.errors import ConfigError, CostTermError, InputError, NonFiniteLossError, RunError

__all__ = ["Engine", "StageChange"]


@dataclass(frozen=True)
class StageChange:
    """A turning point: after ``epoch`` (from 1) the run went from stage ``old`` to ``new`` (from 0).

    ``old_level`` and ``new_level`` are the levels of those stages: precisions, or target cp in per cent.
    """

    epoch: int
    old: int
    new: int
    old_level: Level
    new_level: Level

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch}: stage {self.old + 1} -> {self.new + 1}, "
            f"{show_level(self.old_level)} -> {show_level(self.new_level)}"
        )


class Engine:
    """Trains a ``FracModel`` by its own configuration, inside any training loop.

    Call :meth:`loss` after each forward of a training step, and :meth:`end_epoch` after each epoch. PFQ changes the
    model's precision at turning points, FracTrain its target cp and the precision of ops that no gate can choose for;
    DFQ and SLU hold the last target; static and float have one stage. Nothing in :meth:`loss` waits for the device.

    Args:
        model: the model, also inside ``torch.compile`` or ``DistributedDataParallel``.
        accumulate: batches whose gradients make one optimizer step, if the loop divides each loss by that number.
        schedule: replaces the schedule that the configuration names.
        epochs: length of the run, for the ``manual`` and ``cyclic`` schedules; by default the configuration's.
        watch: whether to check, in the first steps and at the end of the first epoch, that backward reaches the cost
            term and that the optimizer moves gates and model.
    """

    def __init__(
        self,
        model: SteeredModel,
        *,
        accumulate: int = 1,
        schedule: StageSchedule | None = None,
        epochs: int | None = None,
        watch: bool = True,
    ) -> None:
        self.model = steered_model(model)
        note_steered(self.model)
        config = self.model.frac_config if epochs is None else self.model.frac_config.replace(epochs=epochs)
        levels = levels_of(self.model)
        self._plan = StagePlan(levels, schedule) if schedule is not None else plan_stages(config, levels)
        self._controller = CostController(config.gate, config.gate_options, config.gate_weight_bits)
        self.accumulate = accumulate
        self._stage = 0
        self._meter = EpochMeter()
        self._watch = LoopWatch(self.model, watch)
        self.ledger = Ledger(self.model.macs, self.model.uncounted)
        self._apply_level()

    @property
    def accumulate(self) -> int:
        """Batches whose gradients make one optimizer step."""
        return self._controller.accumulate

    @accumulate.setter
    def accumulate(self, batches: int) -> None:
        if batches < 1:
            raise ConfigError(f"accumulate={batches} must be at least 1 batch for an optimizer step")
        self._controller.accumulate = batches

    @property
    def steps(self) -> int:
        """Batches that this process gave to :meth:`loss` since the epoch began."""
        return self._meter.steps

    @property
    def stage(self) -> int:
        """The present stage, counted from 0."""
        return self._stage

    @property
    def level(self) -> Level:
        """The level of the present stage: a precision, or a target cp in per cent."""
        return self._plan.levels[self._stage]

    @property
    def levels(self) -> tuple[Level, ...]:
        """The level of each stage."""
        return self._plan.levels

    def loss(
        self,
        task_loss: Float[Tensor, ""],
        *,
        mean: Float[Tensor, ""] | None = None,
        weight: float | None = None,
    ) -> Float[Tensor, ""]:
        """The loss to call ``backward`` on: the mean task loss of the batch, plus the cost term if there are gates.

        Args:
            task_loss: the loss that the loop minimises.
            mean: the mean task loss of the batch, for ledger and indicator, if ``task_loss`` is scaled otherwise.
            weight: the number by which the loop still divides the loss before gradients are added up; ``accumulate``
                by default, 1 if ``task_loss`` is already the batch's share of the step's loss.

        Raises:
            InputError: the loss is not one number, or the model has not run yet.
            CostTermError: the first optimizer steps changed the model, but backward never reached the cost term.
        """
        if not isinstance(task_loss, Tensor):
            raise InputError(f"engine.loss takes the loss as a tensor of one number, not a {type(task_loss).__name__}")
        self._watch.batch()
        if task_loss.numel() != 1:
            raise InputError(
                f"engine.loss needs one number, got a tensor of shape {tuple(task_loss.shape)}: "
                "take the mean of the losses of the batch first"
            )
        task_loss = task_loss.reshape(())
        cost, samples = self.model.cost, self.model.batch
        seen = task_loss if mean is None else mean.reshape(())
        if not self.model.frac_config.gated:
            self._meter.add(seen, cost, samples)
            self._watch.hand_out(task_loss, cost_term=False)
            return task_loss
        # Ops that follow the stage weigh in cp like blocks of mean size that no gate chooses for.
        blocks = len(cost.choice) / self.model.gated_share
        term = self._controller.term(cost.cp, self._target, samples, blocks, weight)
        share = self.accumulate / (self.accumulate if weight is None else weight)  # of the step's cost term, as a mean
        self._meter.add(seen, cost, samples, cost_term=share * term)
        self._watch.hand_out(term, cost_term=True)
        return task_loss + term

    def start_step(self) -> None:
        """Begin an optimizer step: the strength of the cost term depends on the batches since then.

        Only loops whose steps do not always have ``accumulate`` batches need to call it.
        """
        self._controller.start_step()

    def require_backward(self, culprit: str) -> None:
        """Check that backward has reached every cost term handed out so far.

        Args:
            culprit: names the code that took the losses, for the message.

        Raises:
            CostTermError: it has not.
        """
        unpaid = self._watch.take_unpaid()
        if unpaid:
            raise CostTermError(
                f"{culprit} dropped the cost term: backward was not called on the result of engine.loss "
                f"for {unpaid} batch(es). Call backward on engine.loss(task_loss), or on a sum that holds it"
            )

    def check_finite(self) -> None:
        """Check that all losses of this epoch so far are finite. Waits for the device.

        Raises:
            NonFiniteLossError: one is not; names the first such step of this process.
        """
        refuse_bad_step(self._meter.bad_step(), len(self.ledger.rows) + 1, self._meter.steps)

    def end_epoch(self, mean_loss: float | None = None) -> StageChange | None:
        """Close the epoch, and move to the next stage if the schedule says so.

        Args:
            mean_loss: the loss for the indicator; by default the mean task loss over the epoch's steps, plus the cost
                term if the configuration's ``indicator`` is ``total``.

        Returns:
            The stage change, or ``None``.

        Raises:
            RunError: there was no step since the last call.
            ModelError: the model's modules or parameters are no longer those of its graph.
            CostTermError: the first epoch changed the model but not its gates, or never used the cost term.
            NonFiniteLossError: a task loss, or ``mean_loss``, was NaN or infinite. The epoch is in the ledger, the
                stage stays, and the indicator has not seen the epoch.
        """
        if self._meter.steps == 0:
            raise RunError("end_epoch was called without a training step before it: call engine.loss in each step")
        self.model.look_for_changes()
        self._watch.end_epoch()
        sums, steps = self._meter.read(), self._meter.steps
        self._meter = EpochMeter()
        self._controller.start_step()
        row = self.ledger.close_epoch(sums, self._stage, level_text(self.level), self.model.trained_share)
        refuse_bad_step(sums.bad_step, row.epoch, steps)
        if row.loss is None:  # this process had finite losses, but all must stop together
            raise NonFiniteLossError(f"a task loss of epoch {row.epoch} was NaN or infinite in another process")
        steered = sums.loss + sums.cost_term if self.model.frac_config.indicator == "total" else sums.loss
        seen = steered if mean_loss is None else mean_over_ranks(float(mean_loss), self.model.cost.cp.device)
        if not math.isfinite(seen):
            raise NonFiniteLossError(
                f"the mean loss of epoch {row.epoch} is {seen}: the stage stays; lower the learning rate or look for "
                "a division by zero in the loss"
            )
        return self._move_to(self._plan.schedule.update(seen), row.epoch)

    def state_dict(self) -> dict[str, Any]:
        """Plain values (JSON) that continue this engine elsewhere, taken between optimizer steps.

        Within an epoch this is a collective, because it adds up the open epoch over all processes.
        """
        state = {
            "stage": self._stage,
            "schedule": self._plan.schedule.state_dict(),
            "ledger": self.ledger.to_dict(),
            "controller": self._controller.state_dict(),
        }
        return state if self._meter.steps == 0 else state | {"open_epoch": self._meter.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` gave, and set the model's precision accordingly.

        Raises:
            RunError: the state is no state of an engine, or belongs to a run with more stages.
        """
        missing = [key for key in ("stage", "schedule", "ledger") if key not in (state or {})]
        if missing:
            raise RunError(f"this is no state of an engine, it lacks {', '.join(missing)}: pass what state_dict() gave")
        stage = int(state["stage"])
        if stage >= len(self._plan.levels):
            raise RunError(
                f"the saved run was in stage {stage + 1}, this configuration has {len(self._plan.levels)}: "
                "resume with the configuration that the run started with"
            )
        self._plan.schedule.load_state_dict(state["schedule"])
        self.ledger.load_dict(state["ledger"])
        self._controller.load_state_dict(state.get("controller", {}))
        self._meter = EpochMeter()
        if "open_epoch" in state:
            self._meter.load_state_dict(state["open_epoch"])
        self._stage = stage
        self._apply_level()

    @property
    def _target(self) -> float:
        level = self.level
        if isinstance(level, Precision):
            raise ConfigError(f"a gated model is steered by target cp, its schedule gave {level}")
        return level

    def _move_to(self, stage: int, epoch: int) -> StageChange | None:
        if stage == self._stage:
            return None
        if not 0 <= stage < len(self._plan.levels):
            raise ConfigError(
                f"the schedule's update() returned {stage} after epoch {epoch}: it must return 0 for stage 1, up to "
                f"{len(self._plan.levels) - 1} for stage {len(self._plan.levels)}, the last"
            )
        change = StageChange(epoch, self._stage, stage, self.level, self._plan.levels[stage])
        self._stage = stage
        self._apply_level()
        return change

    def _apply_level(self) -> None:
        if self.model.frac_config.scheduled and isinstance(self.level, Precision):
            self.model.set_precision(self.level)
        elif self.model.frac_config.gated:
            self.model.set_target(self._target)
