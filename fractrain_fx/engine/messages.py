"""Messages for arguments, a training loop, a schedule or a state that go wrong: the fault, and what to change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from fractrain_fx.config.clock import Amount
from fractrain_fx.engine.schedules import StageSchedule
from fractrain_fx.errors import ConfigError, CostTermError, InputError, NonFiniteLossError, RunError

__all__ = [
    "AGAIN",
    "EVALUATION",
    "IF_RARER",
    "UNDIVIDED",
    "check_batch",
    "gates_stay",
    "load_schedule",
    "missed",
    "no_backward",
    "nothing_moves",
    "refuse_mean",
    "refuse_stage",
    "refuse_state",
    "refuse_unpaid",
    "require_batches",
    "require_number",
    "unread",
]

_SHOWN = 4  # names in a message

AGAIN = (
    "engine.loss was called again for the same run of the model: its samples are in the ledger twice, and the cost "
    "term of gates is in the gradients twice. Call it once for each run of the model, on the sum of the losses"
)
EVALUATION = (
    "engine.loss was called for a forward in evaluation mode: there gradients are not rounded, and neither ledger, "
    "stages nor the cost term of gates count it. Call model.train() before an epoch; to keep batch norms as they are, "
    "switch these modules alone to evaluation"
)
UNDIVIDED = (
    "backward got the whole result of engine.loss although Engine(accumulate=...) is more than 1, so the cost term of "
    "gates is too strong by that number: divide what engine.loss gives, (engine.loss(loss) / accumulate).backward(), "
    "and not the loss before it"
)
IF_RARER = ". If another optimizer moves them less often, there is nothing to do; end_epoch looks again"


def no_backward(batches: int, line: str | None) -> str:
    """The message when backward never reached a cost term."""
    where = f" (called in {line})" if line else ""
    return (
        f"the model trains without the cost term: backward never reached the result of engine.loss{where}, for "
        f"{batches} batches, while parameters changed. Write loss = engine.loss(loss), and call backward on that loss "
        "and not on the task's"
    )


def gates_stay(count: int) -> str:
    """The message when the model's parameters change but those of its gates do not."""
    return (
        f"the gates never learn: the optimizer changes the model, and none of the {count} parameters of its gates "
        "(frac.*). An optimizer that was built before fractrainify does not know them. Build it afterwards, from "
        "model.parameters() or model.param_groups(), or add them: optimizer.add_param_group({'params': [p for name, p "
        "in model.named_parameters() if name.startswith('frac.')]})"
    )


def missed(names: Sequence[str], count: int) -> str:
    """The message when some parameters get gradients but never change."""
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return (
        f"{len(names)} of {count} parameters get gradients, and no optimizer step changes them: {shown}. Build the "
        "optimizer from model.parameters() or model.param_groups() after fractrainify. Freeze parameters that are "
        "not to be trained with requires_grad_(False): their gradients are then not computed and not in the cost"
    )


def nothing_moves(batches: int) -> str:
    """The message when no parameter changes."""
    return (
        f"no parameter of the model has changed in {batches} batches: call optimizer.step(), on an optimizer that was "
        "built from model.parameters() of this very model"
    )


def unread(runs: int) -> str:
    """The message when the model ran several times before one loss."""
    return (
        f"the model ran {runs} times before engine.loss: only the samples of the last run are in the ledger, in cp and "
        "in the cost term. Call engine.loss after each run, on its share of the loss, or run the model once on both "
        "batches (torch.cat)"
    )


def refuse_stage(stage: int, stages: int, epoch: int) -> None:
    """Raise a ``ConfigError`` if a schedule gave a stage that a run does not have."""
    if not 0 <= stage < stages:
        raise ConfigError(
            f"the schedule's update() returned {stage} after epoch {epoch}: it must return 0 for stage 1, up to "
            f"{stages - 1} for stage {stages}, the last"
        )


def refuse_state(state: Mapping[str, Any] | None, stages: int) -> None:
    """Raise a ``RunError`` for what is no state of an engine, or that of a run with more stages."""
    missing = [key for key in ("stage", "schedule", "ledger", "cost_term", "clock") if key not in (state or {})]
    if state is None or missing:
        raise RunError(f"this is no state of an engine, it lacks {', '.join(missing)}: pass what state_dict() gave")
    if int(state["stage"]) >= stages:
        raise RunError(
            f"the saved run was in stage {int(state['stage']) + 1}, this configuration has {stages}: "
            "resume with the configuration that the run started with"
        )


def load_schedule(schedule: StageSchedule, state: Mapping[str, Any]) -> None:
    """Continue a schedule from the state of one; a ``RunError`` if it was another kind of schedule."""
    try:
        schedule.load_state_dict(state)
    except (KeyError, TypeError) as error:
        raise RunError(
            f"the saved run had another schedule (its state has {', '.join(map(str, state)) or 'no entries'}): resume "
            "with the configuration that the run started with"
        ) from error


def refuse_unpaid(batches: int, culprit: str) -> None:
    """Raise a ``CostTermError`` if backward never reached the cost terms of some batches."""
    if batches:
        raise CostTermError(
            f"{culprit} dropped the cost term: backward was not called on the result of engine.loss "
            f"for {batches} batch(es). Call backward on engine.loss(task_loss), or on a sum that holds it"
        )


def refuse_mean(loss: float, epoch: int) -> None:
    """Raise a ``NonFiniteLossError`` for the mean loss of an epoch."""
    if not math.isfinite(loss):
        raise NonFiniteLossError(
            f"the mean loss of epoch {epoch} is {loss}: the stage stays; lower the learning rate or look for "
            "a division by zero in the loss"
        )


def check_batch(loss: Any, mean: Any, weight: Any, tokens: Any, labels: Any) -> Tensor:
    """Check the arguments of ``Engine.loss``; returns the loss without dimensions."""
    if not isinstance(loss, Tensor):
        raise InputError(f"engine.loss takes the loss as a tensor of one number, not a {type(loss).__name__}")
    if mean is not None and not (isinstance(mean, Tensor) and mean.numel() == 1):
        raise InputError(
            f"engine.loss got mean={_shown(mean)}: pass the mean task loss of the batch, as a tensor of one number"
        )
    if weight is not None and not (_is_a(Real, weight) and 0 < weight < math.inf):
        raise InputError(
            f"engine.loss got weight={_shown(weight)}: pass the number by which the loop divides the loss, above 0 and "
            "finite, or leave it out"
        )
    if tokens is not None and not (_is_a(Integral, tokens) and tokens >= 0):
        raise InputError(f"engine.loss got tokens={_shown(tokens)}: pass the number of tokens of the batch, as an int")
    if labels is not None and not (isinstance(labels, Tensor) and labels.numel() == 1):
        raise InputError(
            f"engine.loss got labels={_shown(labels)}: pass the labels' number in the batch, as a tensor of one number"
        )
    if loss.numel() != 1:
        raise InputError(
            f"engine.loss needs one number, got a tensor of shape {tuple(loss.shape)}: "
            "take the mean of the losses of the batch first"
        )
    return loss.reshape(())


def require_batches(accumulate: Any) -> int:
    """The batches of an optimizer step, a whole number from 1 on."""
    if not _is_a(Integral, accumulate) or accumulate < 1:
        raise ConfigError(
            f"accumulate={_shown(accumulate)} must be a whole number of batches for an optimizer step, at least 1"
        )
    return int(accumulate)


def require_number(mean_loss: Any, every: Amount | None) -> float | None:
    """The loss that ``Engine.end_epoch`` is given, if any; refused where stages change by ``every``."""
    if mean_loss is None:
        return None
    if every is not None:
        raise ConfigError(f"mean_loss changes nothing with every={str(every)!r}: the schedule sees no epochs")
    fits = mean_loss.numel() == 1 if isinstance(mean_loss, Tensor) else _is_a(Real, mean_loss)
    if not fits:
        raise InputError(f"end_epoch got mean_loss={_shown(mean_loss)}: pass the mean loss of the epoch, as a number")
    return float(mean_loss)


def _is_a(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
