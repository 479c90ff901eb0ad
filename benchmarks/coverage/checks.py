"""One training step or evaluation of a model as numbers, and a comparison of two of them, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fractrain_fx.capture.compare import difference
from fractrain_fx.capture.state import seeded
from fractrain_fx.capture.trees import tensors_in

__all__ = ["Step", "cause", "difference", "evaluate", "floats", "objective", "one_line", "step", "train_outputs"]


@dataclass(frozen=True)
class Step:
    """The outputs, gradients and buffers of one forward and backward pass in training mode."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def floats(output: Any) -> list[Tensor]:
    """The floating-point tensors of an output, in order."""
    return [leaf for leaf in tensors_in(output) if leaf.is_floating_point()]


def objective(output: Any) -> Tensor:
    """The loss in the output, or else a weighted sum of all outputs with a gradient.

    The weights differ, because an even sum of a softmax or a normalised feature has no gradient. Values that masks set
    to infinity are left out.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad:
        return loss.float().sum()
    terms = [
        (
            leaf.float().nan_to_num(0.0, 0.0, 0.0).reshape(-1) * torch.arange(leaf.numel(), device=leaf.device).cos()
        ).mean()
        for leaf in floats(output)
        if leaf.requires_grad and leaf.numel()
    ]
    return torch.stack(terms).sum() if terms else torch.zeros(())


def step(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int) -> Step:
    """Outputs, gradients and buffers of one training step with a seed; the gradients stay on the parameters."""
    model.train()
    model.zero_grad(set_to_none=True)
    with seeded(seed):
        args, kwargs = _copied(args, kwargs)
        output = model(*args, **kwargs)
        objective(output).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    buffers = {name: b.clone() for name, b in model.named_buffers() if not name.startswith("frac.")}
    return Step([leaf.detach() for leaf in floats(output)], gradients, buffers)


def evaluate(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int = 0) -> list[Tensor]:
    """Floating-point outputs in evaluation mode."""
    model.eval()
    with torch.no_grad(), seeded(seed):
        args, kwargs = _copied(args, kwargs)
        return floats(model(*args, **kwargs))


def train_outputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int = 0) -> list[Tensor]:
    """Floating-point outputs in training mode."""
    model.train()
    with seeded(seed):
        args, kwargs = _copied(args, kwargs)
        return [leaf.detach() for leaf in floats(model(*args, **kwargs))]


def cause(error: BaseException) -> str:
    """The class and the message of an error, and of its cause."""
    behind = f" from {cause(error.__cause__)}" if error.__cause__ else ""
    return f"{type(error).__name__}: {one_line(error)}{behind}"


def one_line(error: BaseException) -> str:
    """The message alone."""
    return " ".join(str(error).split())[:600]


def _copied(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies of the inputs, because a model may write to them."""
    copies: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(
        Tensor, lambda x: x.detach().clone(), (args, dict(kwargs))
    )
    return copies
