"""Compare a recorded graph with the model it came from: outputs, gradients and buffers, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fractrain_fx.capture.batch import batch_size, resize_batch
from fractrain_fx.capture.call import Example
from fractrain_fx.capture.compare import difference, same_tensor
from fractrain_fx.capture.module import RecordedModule
from fractrain_fx.capture.patch import plain_paths
from fractrain_fx.capture.state import preserved, seeded
from fractrain_fx.capture.trees import tensors_in

__all__ = ["Mismatch", "Trial", "find_mismatch", "other_batch"]

# A model told that values must not be read may take another path to the same result (an attention mask that masks
# nothing, rather than none). The graph follows that path bit for bit, and the usual one up to rounding.
_ROUNDING = 1e-4


@dataclass(frozen=True)
class Trial:
    """One run: in which mode, on which call."""

    train: bool
    example: Example


@dataclass(frozen=True)
class Mismatch:
    """A run in which the graph was not its model.

    Attributes:
        trial: the run.
        cause: what differed, in words.
        parameters: parameters whose gradients differ while the outputs agree.
        error: what the graph raised.
    """

    trial: Trial
    cause: str
    parameters: tuple[str, ...] = ()
    error: Exception | None = None


@dataclass(frozen=True)
class _Outcome:
    output: Any
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def other_batch(model: nn.Module, example: Example, axis: int) -> Example | None:
    """The same call with one sample more, or ``None`` if the model does not run at another batch size."""
    inputs = (example.args, example.kwargs)
    size = batch_size(inputs, axis)
    if size is None:
        return None
    args, kwargs = resize_batch(inputs, size + 1, axis)
    values = example.spec.bind(args, kwargs)
    grown = Example(example.spec, dict(zip(example.spec.placeholders, values, strict=True)), args, kwargs)
    model.eval()
    try:
        with preserved(model), seeded(), torch.no_grad(), plain_paths(value_free=False):
            model(*grown.args, **grown.kwargs)
    except Exception:  # whatever a model says to a batch size that it does not take
        return None
    return grown


def find_mismatch(model: nn.Module, recorded: RecordedModule, trial: Trial) -> Mismatch | None:
    """Run model and graph from the same seed and compare."""
    expected = _run(model, model, trial, value_free=False)
    try:
        actual = _run(model, recorded, trial, value_free=False)
    except Exception as error:  # any error of the graph is a mismatch, as the model ran
        return Mismatch(trial, f"the graph fails where the model runs: {type(error).__name__}: {error}", error=error)
    found = _differ(trial, expected, actual)
    if found is None:
        return None
    again = _run(model, model, trial, value_free=False)
    if _differ(trial, expected, again) is not None:
        # The model itself is not deterministic (atomic additions on a GPU): equal up to rounding is all there is.
        return _differ(trial, expected, actual, _ROUNDING)
    if _differ(trial, _run(model, model, trial, value_free=True), actual) is None:
        return _differ(trial, expected, actual, _ROUNDING)
    return found


def _run(model: nn.Module, run: Callable[..., Any], trial: Trial, value_free: bool) -> _Outcome:
    model.train(trial.train)
    example = trial.example.renewed(lambda x: x.detach().clone().requires_grad_(x.requires_grad))
    with preserved(model), seeded(), plain_paths(value_free=value_free), torch.set_grad_enabled(trial.train):
        if isinstance(run, RecordedModule):
            run.train(trial.train)
            output = run.forward(*example.tensors.values())
        else:
            output = run(*example.args, **example.kwargs)
        gradients = _gradients(model, example, output) if trial.train else {}
        buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()} if trial.train else {}
    return _Outcome(output, gradients, buffers)


def _gradients(model: nn.Module, example: Example, output: Any) -> dict[str, Tensor | None]:
    """Gradients of a weighted sum of all outputs; the weights differ, as an even sum of a softmax has no gradient."""
    terms = []
    for x in tensors_in(output):
        if x.requires_grad and x.is_floating_point():
            weights = torch.arange(x.numel(), device=x.device, dtype=torch.float32).cos().to(x.dtype)
            terms.append((x.reshape(-1) * weights).sum())
    if not terms:
        return {}
    total = torch.stack([term.double() for term in terms]).sum()
    wanted = {name: p for name, p in model.named_parameters() if p.requires_grad}
    wanted |= {f"input {i}": x for i, x in enumerate(tensors_in(example.tensors)) if x.requires_grad}
    found = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
    return dict(zip(wanted, found, strict=True))


def _differ(trial: Trial, expected: _Outcome, actual: _Outcome, tolerance: float = 0.0) -> Mismatch | None:
    words = difference(expected.output, actual.output, tolerance=tolerance)
    if words:
        return Mismatch(trial, words)
    for name, before in expected.buffers.items():
        if not same_tensor(before, actual.buffers[name], tolerance):
            return Mismatch(trial, f"buffer {name!r} is left with other values", parameters=(name,))
    wrong = tuple(
        name for name, x in expected.gradients.items() if not same_tensor(x, actual.gradients.get(name), tolerance)
    )
    if wrong:
        return Mismatch(trial, f"the gradient of {', '.join(wrong[:3])} differs", parameters=wrong)
    return None
