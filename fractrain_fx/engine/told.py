"""What a training loop that goes wrong is told: what, and which line to change."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["IF_RARER", "gates_stay", "missed", "no_backward", "nothing_moves"]

_SHOWN = 4  # names in a message

IF_RARER = ". If another optimizer moves them less often, there is nothing to do; end_epoch looks again"


def no_backward(batches: int, line: str | None) -> str:
    """No cost term was part of what backward was called on."""
    where = f" (called in {line})" if line else ""
    return (
        f"the model trains without the cost term: backward never reached what engine.loss returned{where}, for "
        f"{batches} batches, while parameters changed. Write loss = engine.loss(loss), and call backward on that loss "
        "and not on the task's"
    )


def gates_stay(count: int) -> str:
    """The model's parameters change, those of the gates do not."""
    return (
        f"the gates never learn: the optimizer changes the model, and none of the {count} parameters of its gates "
        "(frac.*). An optimizer that was built before fractrainify does not know them. Build it afterwards, from "
        "model.parameters() or model.param_groups(), or add them: optimizer.add_param_group({'params': [p for name, p "
        "in model.named_parameters() if name.startswith('frac.')]})"
    )


def missed(names: Sequence[str], count: int) -> str:
    """Some parameters get gradients and never change."""
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return (
        f"{len(names)} of {count} parameters get gradients, and no optimizer step changes them: {shown}. Build the "
        "optimizer from model.parameters() or model.param_groups() after fractrainify. What is not to be trained, "
        "freeze by requires_grad_(False): its gradient is then neither computed nor counted in the cost"
    )


def nothing_moves(batches: int) -> str:
    """No parameter changes at all."""
    return (
        f"no parameter of the model has changed in {batches} batches: call optimizer.step(), on an optimizer that was "
        "built from model.parameters() of this very model"
    )
