"""Models rewritten for tests, and the paper's settings for tests that need blocks to be skipped, or its numbers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from fractrain_fx import FracConfig, FracModel, fractrainify
from fractrain_fx.capture.trees import tensors_in
from tests.models import Case

__all__ = ["made_once", "objective", "paper", "rewritten"]

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")


def made_once(build: Callable[Arguments, Made]) -> Callable[Arguments, Made]:
    """The builder, run once in a process for each set of arguments; every call gets a copy.

    Rewriting a model takes about ten times as long as copying it. A builder seeds torch's generator: each call leaves
    the generator in the state in which the builder left it.
    """
    kept: dict[Any, tuple[Made, Tensor]] = {}

    @functools.wraps(build)
    def copied(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
        key = args, tuple(kwargs.items())
        if key not in kept:
            kept[key] = build(*args, **kwargs), torch.get_rng_state()
        made, state = kept[key]
        torch.set_rng_state(state)
        return copy.deepcopy(made)

    return copied


def paper(method: str = "fractrain", **changes: Any) -> FracConfig:
    """The paper's options, weights, targets and stages, with stages of equal length in a short run."""
    return FracConfig.paper(method, **{"schedule": "by-length", **changes})


def rewritten(
    model: nn.Module | Case,
    *inputs: Any,
    keywords: Mapping[str, Any] | None = None,
    config: FracConfig | None = None,
    check: bool = False,
    **settings: Any,
) -> FracModel:
    """A model rewritten on a batch of inputs, or a case on its own batch.

    Args:
        model: the model or case.
        inputs: positional inputs; none: those that are found for the model.
        keywords: keyword inputs.
        config: the configuration; by default ``settings`` are its fields.
        check: compare the recorded graph with the model.
        settings: fields of :class:`FracConfig`.
    """
    if not isinstance(model, nn.Module):
        inputs, keywords, model = model.args, model.keywords, model.model
    return fractrainify(
        model,
        config=FracConfig(**settings) if config is None else config,
        example_inputs=inputs or None,
        example_kwargs=keywords or None,
        check=check,
    )


def objective(output: Any) -> Tensor:
    """The loss in an output, or else a sum of its values, with weights that differ: softmax sums to a constant."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is not None:
        return loss.sum()
    parts = [x.flatten() for x in tensors_in(output) if x.is_floating_point() and x.requires_grad]
    return torch.stack([(x * torch.arange(len(x)).cos()).mean() for x in parts]).sum()
