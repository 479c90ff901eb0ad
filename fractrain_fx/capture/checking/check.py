"""Compare a recorded graph with the model it came from: outputs, gradients and buffers, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from fractrain_fx.capture.compare import difference, same_tensor
from fractrain_fx.capture.inputs.batch import batch_size, resize_batch
from fractrain_fx.capture.inputs.call import Example
from fractrain_fx.capture.inputs.data import rejection
from fractrain_fx.capture.module import RecordedModule
from fractrain_fx.capture.recording.patch import plain_paths
from fractrain_fx.capture.state import Snapshot, seeded
from fractrain_fx.capture.trees import tensors_in

__all__ = ["Batching", "Mismatch", "Trial", "find_mismatch", "rejection", "repeated", "trial_of", "trials_of"]

# A model told that values must not be read may take another path to the same result (an attention mask that masks
# nothing instead of no mask). The graph equals that path bit for bit, and the usual path up to this relative rounding.
_ROUNDING = 1e-4

# Rounding error of a gradient that is 0, relative to the largest gradient of all.
_NOTHING = 1e-6


class Batching(Enum):
    """How inputs grow with the number of samples."""

    ROWS = "each sample adds one row to every tensor with a row for each sample"
    PACKED = "each sample adds several rows, one sample after the other"
    FIXED = "only the batch size of the example runs"


@dataclass(frozen=True)
class _Outcome:
    output: Any
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


@dataclass(frozen=True)
class Trial:
    """One run of the model: its mode, its call, and the outcome."""

    train: bool
    example: Example
    expected: _Outcome


@dataclass(frozen=True)
class Mismatch:
    """A run in which the graph differed from its model.

    Attributes:
        trial: the run.
        cause: the difference, in words.
        names: parameters (or buffers) whose gradients (or values) differ while the outputs agree.
    """

    trial: Trial
    cause: str
    names: tuple[str, ...] = ()


def trials_of(snapshot: Snapshot, example: Example, axis: int, grow: bool = True) -> tuple[list[Trial], Batching]:
    """Runs of the model in eval and train mode, to compare the graph with, and how a batch can grow.

    They have more samples than the example; without ``grow``, or if the model does not run with more, the same number.

    Raises:
        InputError: the model fails on the example.
    """
    inputs = (example.args, example.kwargs)
    for batching in (Batching.ROWS, Batching.PACKED) if grow else ():
        packed = batching is Batching.PACKED
        size = batch_size(inputs, axis, packed=packed)
        if not size:
            continue
        # Twice as many in evaluation, which needs no memory for gradients: code that takes a share of the batch shows.
        grown = {
            train: example.on(*resize_batch(inputs, samples, axis, packed=packed))
            for train, samples in ((False, 2 * size + 1), (True, size + 1))
        }
        try:
            runs = [trial_of(snapshot, call, train) for train, call in grown.items()]
        except Exception:  # a model may raise anything for a batch size that it does not take
            continue
        return runs, batching
    try:
        runs = [trial_of(snapshot, example, train) for train in (False, True)]
    except Exception as error:  # a model may raise anything for inputs that it does not take
        raise rejection(type(snapshot.model).__name__, error) from error
    return runs, Batching.FIXED


def trial_of(snapshot: Snapshot, example: Example, train: bool) -> Trial:
    """Run the model on a call."""
    return Trial(train, example, _run(snapshot, snapshot.model, train, example))


def find_mismatch(snapshot: Snapshot, recorded: RecordedModule, trial: Trial) -> Mismatch | None:
    """Run the graph from the same seed as the model, and compare."""
    try:
        actual = _run(snapshot, recorded, trial.train, trial.example)
    except Exception as error:  # any error of the graph is a mismatch, because the model ran
        return Mismatch(trial, f"the graph fails where the model runs: {type(error).__name__}: {error}")
    found = _differ(trial, trial.expected, actual)
    if found is None:
        return None
    again = _run(snapshot, snapshot.model, trial.train, trial.example)
    if _differ(trial, trial.expected, again) is not None:
        # The model itself is not deterministic (atomic additions on a GPU), so only equality up to rounding can hold.
        return _differ(trial, trial.expected, actual, _ROUNDING)
    if _differ(trial, _run(snapshot, snapshot.model, trial.train, trial.example, value_free=True), actual) is None:
        return _differ(trial, trial.expected, actual, _ROUNDING)
    return found


def repeated(snapshot: Snapshot, recorded: RecordedModule, trial: Trial) -> str | None:
    """The difference between graph and model in the second of two calls in a row, in words, or ``None``.

    A module that stays one call may keep something from call to call that other code of the model resets.
    """
    outputs = []
    for run in (snapshot.model, recorded):
        with snapshot.preserved(), plain_paths(), torch.no_grad():
            try:
                for _ in range(2):
                    with seeded():
                        output = _call(snapshot.model, run, trial.train, trial.example.renewed())
            except Exception as error:
                return f"the graph fails: {type(error).__name__}: {error}" if run is recorded else None
        outputs.append(output)
    theirs, mine = outputs
    return difference(theirs, mine, tolerance=_ROUNDING)


def _call(model: nn.Module, run: nn.Module, train: bool, example: Example) -> Any:
    model.train(train)
    if isinstance(run, RecordedModule):
        run.train(train)
        # Not through ``__call__``, which prints the generated code when a node fails.
        return run.forward(*example.tensors.values())
    return run(*example.args, **example.kwargs)


def _run(snapshot: Snapshot, run: nn.Module, train: bool, example: Example, value_free: bool = False) -> _Outcome:
    model, example = snapshot.model, example.renewed()
    # Listed before the run, because a model may put results into a dictionary among its inputs.
    inputs = list(tensors_in(example.tensors))
    with snapshot.preserved(), seeded(), plain_paths(value_free=value_free), torch.enable_grad():
        output = _call(model, run, train, example)
        gradients = _gradients(model, inputs, output) if train else {}
        buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()} if train else {}
    return _Outcome(output, gradients, buffers)


def _gradients(model: nn.Module, inputs: list[Tensor], output: Any) -> dict[str, Tensor | None]:
    """Gradients of a weighted sum of all outputs. The weights differ: an even sum of a softmax has no gradient."""
    terms = []
    for x in tensors_in(output):
        if x.requires_grad and x.is_floating_point():
            weights = torch.arange(x.numel(), device=x.device, dtype=torch.float32).cos().to(x.dtype)
            terms.append((x.reshape(-1) * weights).sum().double())
    if not terms:
        return {}
    wanted: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    wanted |= {f"input {i}": x for i, x in enumerate(inputs) if x.requires_grad}
    found = torch.autograd.grad(torch.stack(terms).sum(), list(wanted.values()), allow_unused=True)
    return dict(zip(wanted, found, strict=True))


def _differ(trial: Trial, expected: _Outcome, actual: _Outcome, tolerance: float = 0.0) -> Mismatch | None:
    words = difference(expected.output, actual.output, tolerance=tolerance)
    if words:
        return Mismatch(trial, words)
    for name, before in expected.buffers.items():
        if not same_tensor(before, actual.buffers[name], tolerance):
            return Mismatch(trial, f"buffer {name!r} is left with other values", names=(name,))
    # A gradient that is 0 except for rounding (of a query with only one key) has no digits to compare.
    floor = _NOTHING * max((_largest(x) for x in expected.gradients.values()), default=0.0) if tolerance else 0.0
    wrong = tuple(
        name
        for name, x in expected.gradients.items()
        if not same_tensor(x, actual.gradients.get(name), tolerance, floor)
    )
    if wrong:
        return Mismatch(trial, f"the gradient of {', '.join(wrong[:3])} differs", names=wrong)
    return None


def _largest(x: Tensor | None) -> float:
    finite = None if x is None or x.is_sparse else x[x.isfinite()]
    return 0.0 if finite is None or not finite.numel() else float(finite.abs().max())
