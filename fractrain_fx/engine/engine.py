"""The engine: adds the cost term to each loss, keeps the ledger, and moves the stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jaxtyping import Float
from torch import Tensor

from fractrain_fx.config.clock import Amount
from fractrain_fx.engine import messages, steered
from fractrain_fx.engine.clock import RunClock, StageChange
from fractrain_fx.engine.cost_term import CostTerm
from fractrain_fx.engine.course import Course, Staged, SteeredRun
from fractrain_fx.engine.distributed import mean_over_ranks
from fractrain_fx.engine.ledger import Ledger
from fractrain_fx.engine.meter import EpochSums, refuse_bad_step, require_finite
from fractrain_fx.engine.schedules import LoopLength, StageSchedule
from fractrain_fx.engine.steered import SteeredModel
from fractrain_fx.engine.watch import LoopWatch
from fractrain_fx.errors import RunError
from fractrain_fx.nn.cost import Forward

__all__ = ["Engine", "StageChange"]


class Engine(Staged):
    """Trains a ``FracModel`` by its own configuration, inside any training loop (paper, Algorithms 1 and 2).

    Call :meth:`loss` after each forward of a training step, and :meth:`end_epoch` after each epoch; with the
    schedule's ``every``, also :meth:`end_step` after each optimizer step. PFQ changes the model's precision at
    turning points, FracTrain its target cp and the precision of ops that no gate can choose for; DFQ and SLU hold the
    last target; static and float have one stage. Nothing in :meth:`loss` waits for the device.

    Args:
        model: the model, also inside ``torch.compile`` or ``DistributedDataParallel``.
        accumulate: batches whose gradients make one optimizer step, if the loop divides each loss by that number.
        schedule: replaces the schedule that the configuration names.
        epochs: length of the run, by which its stages are planned; by default the configuration's.
        length: the same in steps or tokens, if the schedule's ``every`` counts them.
        watch: whether to check, in the first steps and at the end of the first epoch, that backward reaches the cost
            term and that the optimizer moves gates and model.
    """

    def __init__(
        self,
        model: SteeredModel | Callable[..., Any],
        *,
        accumulate: int = 1,
        schedule: StageSchedule | None = None,
        epochs: int | None = None,
        length: Amount | None = None,
        watch: bool = True,
    ) -> None:
        self.model = steered.steered_model(model)
        config, amount = self.model.frac_config, epochs if length is None else length
        config = config if amount is None else config.replace(**{"run.length": amount})
        self._course = Course(config, steered.levels_of(self.model), schedule, epochs)
        self._cost_term = CostTerm(config.gate, config.gate_options, config.gate_weight_bits)
        self.accumulate = accumulate
        self._paused = False
        self._clock = RunClock(config.schedule.every)
        self._watch = LoopWatch(self.model, watch, unscaled=config.gate.gradient == "fisher")
        self.ledger = Ledger(self.model.macs, self.model.training_macs, self.model.uncounted, self._course.texts)
        steered.note_steered(self.model, SteeredRun(self._course, self.ledger))
        steered.apply_level(self.model, self.level)

    @property
    def accumulate(self) -> int:
        """Batches whose gradients make one optimizer step."""
        return self._cost_term.accumulate

    @accumulate.setter
    def accumulate(self, batches: int) -> None:
        self._cost_term.accumulate = messages.require_batches(batches)

    @property
    def steps(self) -> int:
        """Batches that this process gave to :meth:`loss` since the epoch began."""
        return self.ledger.batches

    def expect(self, *, epochs: int | None = None, steps: int | None = None) -> None:
        """Say how long the loop is, before its first step; trainers do. A run that has begun is not planned again.

        Warns if the last stage cannot be reached in this length.

        Args:
            epochs: calls of :meth:`end_epoch`.
            steps: calls of :meth:`end_step`, if the loop calls it: by these a run of few epochs is divided.

        Raises:
            ConfigError: the schedule does not fit the length.
        """
        if self.steps or self.ledger.rows:
            return
        self._course.expect(LoopLength(epochs, steps))
        self._clock, self.ledger.levels = RunClock(self._course.plan.every), self._course.texts
        steered.apply_level(self.model, self.level)

    def loss(
        self,
        task_loss: Float[Tensor, ""],
        *,
        mean: Float[Tensor, ""] | None = None,
        weight: float | None = None,
        tokens: int | None = None,
        labels: Float[Tensor, ""] | None = None,
    ) -> Float[Tensor, ""]:
        """The loss to call ``backward`` on: the mean task loss of the batch, plus the cost term if there are gates.

        The batch is that of the model's last forward with gradients in training mode: what a teacher or an evaluation
        ran since then does not count.

        Args:
            task_loss: the loss that the loop minimises.
            mean: the mean task loss of the batch, for ledger and indicator, if ``task_loss`` is scaled otherwise.
            weight: the number by which the loop still divides the loss before gradients are added up; ``accumulate``
                by default, 1 if ``task_loss`` is already the batch's share of the step's loss.
            tokens: tokens of the batch in this process; by default the size of the model's matrix of tokens.
            labels: the number of labels that the mean loss is over, by which ledger and indicator then weigh it (0
                labels, whose mean is NaN, weigh nothing); by default they weigh by samples.

        Raises:
            InputError: the loss is not one number, another argument does not fit, or the model has not run yet.
            RunError: the schedule has ``every``, and :meth:`end_step` was not called after the last step.
            CostTermError: the first optimizer steps changed the model, but backward never reached the cost term.
        """
        task_loss = messages.check_batch(task_loss, mean, weight, tokens, labels)
        if self._paused or self._watch.is_evaluation(ran := self.model.count_forward()):
            return task_loss
        cost = ran.cost
        self._watch.batch(cost.cp)
        self._course.begin()
        self._clock.batch(ran.tokens if tokens is None else tokens, self.accumulate)
        divisor = self.accumulate if weight is None else weight
        loss = task_loss if mean is None else mean.reshape(())
        if not self.model.frac_config.gated:
            self._note(loss, ran, labels=labels)
            self._watch.hand_out(task_loss, cost_term=False)
            return task_loss
        blocks = len(cost.choice) / self.model.gated_share  # ops that follow the stage weigh like blocks of mean size
        term = self._cost_term.of_batch(cost.cp, steered.target_of(self.level), ran.batch, blocks, weight)
        self._note(loss, ran, self.accumulate / divisor * term, labels)  # the share of the step's cost term, as a mean
        self._watch.hand_out(term, cost_term=True, weight=weight, divided=weight is None and self.accumulate > 1)
        return task_loss + term

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing meanwhile: :meth:`loss` gives the task loss back. For passes that train nothing.

        Such a pass measures statistics with the model in training mode, as stochastic weight averaging does.
        """
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def start_step(self) -> None:
        """Begin an optimizer step in loops whose steps vary in batches; those of a step without end belong to none."""
        self._cost_term.start_step()
        self._clock.abandon_step()

    def abandon_step(self) -> None:
        """Forget an optimizer step that an exception ended; trainers call this before training begins again."""
        self.start_step()
        self._watch.take_unpaid()

    def end_step(self) -> StageChange | None:
        """Close an optimizer step; with a clock of steps or tokens, move to the next stage if the schedule says so.

        The schedule does not see a window whose batches were all empty. This waits for the device after each ``every``;
        on several processes after each step if ``every`` counts tokens.

        Returns:
            The stage change, or ``None``.

        Raises:
            RunError: the schedule has ``every``, and there was no batch since the last step.
            ConfigError: one optimizer step has more tokens than ``every``.
            NonFiniteLossError: a task loss since the schedule was last asked was NaN or infinite. The stage stays.
        """
        self._cost_term.start_step()
        if not self._clock.end_step():
            return None
        sums = self._clock.close_window()
        if not sums.weight:
            return None
        loss = self._finite_loss(sums, "since the schedule was last asked")
        return self._move_to(self._course.plan.schedule.update(loss), len(self.ledger.rows) + 1)

    def require_backward(self, culprit: str) -> None:
        """Check that backward has reached every cost term handed out so far.

        Args:
            culprit: names the code that took the losses, for the message.

        Raises:
            CostTermError: it has not.
        """
        messages.refuse_unpaid(self._watch.take_unpaid(), culprit)

    def check_finite(self) -> None:
        """Raise a ``NonFiniteLossError`` if a loss of this epoch so far is not finite. Waits for the device."""
        refuse_bad_step(self.ledger.bad_step(), f"of epoch {len(self.ledger.rows) + 1}", self.model)

    def end_epoch(self, mean_loss: float | None = None) -> StageChange | None:
        """Close the epoch; move on if the schedule, which sees no epoch of empty batches, says so and is asked now.

        Args:
            mean_loss: the loss for the schedule; by default the mean task loss over the epoch's steps, plus the cost
                term if the schedule's ``indicator`` is ``total``. Not with ``every``.

        Returns:
            The stage change, or ``None``.

        Raises:
            RunError: there was no step since the last call.
            InputError: ``mean_loss`` is not a number.
            ConfigError: ``mean_loss`` is given, although ``every`` shows no epoch to the schedule.
            ModelError: the model's modules or parameters are no longer those of its graph.
            CostTermError: the first epoch changed the model but not its gates, or never used the cost term.
            NonFiniteLossError: a task loss, or ``mean_loss``, was NaN or infinite. The epoch is in the ledger, the
                stage stays, and the indicator has not seen the epoch.
        """
        if self.steps == 0:
            raise RunError("end_epoch was called without a training step before it: call engine.loss in each step")
        mean = messages.require_number(mean_loss, self._clock.every)
        self.model.look_for_changes()
        self._watch.end_epoch()
        sums = self.ledger.close_epoch(self.stage, self._clock)
        self._cost_term.start_step()
        self._course.end_epoch(self.ledger.rows)
        if sums is None:  # the stage changed after the epoch's last step, and all losses were finite
            return None
        epoch = len(self.ledger.rows)
        if not sums.weight:
            return None
        loss = self._finite_loss(sums, f"of epoch {epoch}")
        if self._clock.every is not None:
            return None
        shown_loss = loss if mean is None else mean_over_ranks(mean)
        messages.refuse_mean(shown_loss, epoch)
        return self._move_to(self._course.plan.schedule.update(shown_loss), epoch)

    def state_dict(self) -> dict[str, Any]:
        """Plain values (JSON) that continue this engine elsewhere, taken between optimizer steps.

        Unless an epoch, and the stretch that ``every`` counts, have just ended, all processes must call this together.
        """
        return {
            "stage": self.stage,
            "schedule": self._course.plan.schedule.state_dict(),
            "ledger": self.ledger.to_dict(),
            "cost_term": self._cost_term.state_dict(),
            "clock": self._clock.state_dict(),
            **self.ledger.open_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` gave, and set the model's precision accordingly.

        The step that is open is forgotten. A state that is refused changes nothing.

        Raises:
            RunError: the state is no state of an engine, or belongs to a run with more stages or another schedule.
        """
        messages.refuse_state(state, len(self.levels))
        with self._course.unchanged_on_error(self.ledger, self._cost_term, self._clock):
            messages.load_schedule(self._course.plan.schedule, state["schedule"])
            self.ledger.load_dict(state["ledger"])
            self._cost_term.load_state_dict(state["cost_term"])
            self._clock.load_state_dict(state["clock"])
            self.ledger.load_open_dict(state)
            self._course.stage = int(state["stage"])
            steered.apply_level(self.model, self.level)
        self._watch.take_unpaid()

    def _note(self, loss: Tensor, ran: Forward, cost_term: Tensor | None = None, labels: Tensor | None = None) -> None:
        self.ledger.add(loss, ran.cost, ran.batch, cost_term, labels)
        self._clock.add(loss, ran.batch, cost_term, labels)

    def _finite_loss(self, sums: EpochSums, stretch: str) -> float:
        """The loss that the schedule sees."""
        require_finite(sums, stretch, self.model)
        return sums.loss + sums.cost_term if self.model.frac_config.schedule.by_total_loss else sums.loss

    def _move_to(self, stage: int, epoch: int) -> StageChange | None:
        if stage == self.stage:
            return None
        messages.refuse_stage(stage, len(self.levels), epoch)
        if self._clock.every is not None:
            self.ledger.close_part(self.stage, self._clock)
        change = StageChange(epoch, self.stage, stage, self.level, self.levels[stage], *self._clock.place)
        self._course.stage = stage
        steered.apply_level(self.model, self.level)
        return change
