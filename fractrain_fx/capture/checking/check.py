"""Compare a recorded graph with the model it came from: outputs, gradients and buffers, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn
from torch.fx import Interpreter

from fractrain_fx.capture.checking.outcome import Outcome, outcome_of, read_run, second_output
from fractrain_fx.capture.compare import difference, same_tensor
from fractrain_fx.capture.inputs.batch import batch_size, resize_batch
from fractrain_fx.capture.inputs.call import Example
from fractrain_fx.capture.inputs.data import rejection
from fractrain_fx.capture.model_errors import model_errors
from fractrain_fx.capture.module import RecordedModule
from fractrain_fx.capture.state import Snapshot
from fractrain_fx.errors import CaptureError

__all__ = ["ROUNDING", "Batching", "Mismatch", "Trial", "find_mismatch", "repeated", "trial_of", "trials_of"]

# A model told that values must not be read may take another path to the same result (an attention mask that masks
# nothing instead of no mask). The graph equals that path bit for bit, and the usual path up to this relative rounding.
ROUNDING = 1e-4

# Rounding error of a gradient that is 0, relative to the largest gradient of all.
_NOTHING = 1e-6

# Values that are compared with a tolerance are in memory in groups of at most this share of all, or one at a time.
_GROUP = 0.25


class Batching(Enum):
    """How inputs grow with the number of samples."""

    ROWS = "each sample adds one row to every tensor with a row for each sample"
    PACKED = "each sample adds several rows, one sample after the other"
    FIXED = "only the batch size of the example runs"


@dataclass(frozen=True)
class Trial:
    """One run of the model: its mode, its call, the outcome, and whether the run went backward."""

    train: bool
    example: Example
    expected: Outcome
    backward: bool = True


@dataclass(frozen=True)
class Mismatch:
    """A run in which the graph differed from its model.

    Attributes:
        trial: the run.
        cause: the difference, in words.
        names: parameters (or buffers) whose gradients (or values) differ while the outputs agree.
        failed: whether the graph raised an error.
    """

    trial: Trial
    cause: str
    names: tuple[str, ...] = ()
    failed: bool = False


def trials_of(snapshot: Snapshot, example: Example, axis: int, grow: bool = True) -> tuple[list[Trial], Batching]:
    """Runs of the model in eval and train mode, to compare the graph with, and how a batch can grow.

    They have more samples than the example; without ``grow``, or if the model does not run with more, the same number.

    Raises:
        InputError: the model fails on the example.
        CaptureError: a GPU stopped.
    """
    inputs = (example.args, example.kwargs)
    for batching in (Batching.ROWS, Batching.PACKED) if grow else ():
        packed = batching is Batching.PACKED
        size = batch_size(inputs, axis, packed=packed)
        if not size:
            continue
        # Twice as many in evaluation, which needs no memory for gradients: code that takes a share of the batch shows.
        grown = {
            train: example.spec.example(*resize_batch(inputs, samples, axis, packed=packed))
            for train, samples in ((False, 2 * size + 1), (True, size + 1))
        }
        try:
            return [trial_of(snapshot, call, train) for train, call in grown.items()], batching
        except model_errors() as error:  # the model may not take this batch size
            if isinstance(error, torch.AcceleratorError):  # it ended all work of a GPU
                raise CaptureError(
                    "the GPU stopped while the model ran at another size than its example's, and this process can use "
                    "it no more: start anew, rewrite the model on the CPU and move it then "
                    f"(fractrainify(model).to('cuda')), or pass check=False ({error})"
                ) from error
    try:
        return [trial_of(snapshot, example, train) for train in (False, True)], Batching.FIXED
    except model_errors() as error:
        raise rejection(type(snapshot.model).__name__, error) from error


def trial_of(snapshot: Snapshot, example: Example, train: bool, *, backward: bool = True) -> Trial:
    """Run the model on a call."""
    expected = outcome_of(snapshot, snapshot.model, train, example, backward=backward)
    return Trial(train, example, expected, backward)


def find_mismatch(
    snapshot: Snapshot, graph: RecordedModule | Interpreter, trial: Trial, rounding: float = ROUNDING
) -> Mismatch | None:
    """Run the graph from the same seed as the model, and compare.

    Args:
        snapshot: the model.
        graph: the recorded graph, or an interpreter of one.
        trial: the run of the model.
        rounding: the rounding, relative to the largest value, by which two paths to the same result may differ.
    """
    expected = trial.expected

    def run(which: nn.Module | Interpreter, *, value_free: bool = False) -> Outcome:
        return outcome_of(snapshot, which, trial.train, trial.example, backward=trial.backward, value_free=value_free)

    try:
        actual = run(graph)
    except model_errors() as error:  # any error of the graph is a mismatch, because the model ran
        return Mismatch(trial, f"the graph fails where the model runs: {type(error).__name__}: {error}", failed=True)
    mismatch = _differ(trial, expected, actual)
    if mismatch is None:
        return None
    # If the model itself is not deterministic (atomic additions on a GPU), only equality up to rounding can hold.
    if _differ(trial, expected, run(snapshot.model)) is None:
        other_path = run(snapshot.model, value_free=True)
        if _differ(trial, other_path, actual) is not None:
            return mismatch
    words = difference(expected.output, actual.output, tolerance=rounding)
    if words:
        return Mismatch(trial, words)
    groups = _groups(expected, actual)
    wrong = (name for group in groups for name in _beyond_rounding(snapshot, graph, trial, group, rounding))
    return _of_names(trial, expected, list(wrong))


def repeated(snapshot: Snapshot, recorded: RecordedModule, trial: Trial) -> str | None:
    """The difference between graph and model in the second of two calls in a row, in words, or ``None``.

    A module that stays one call may keep something from call to call that other code of the model resets.
    """
    outputs = []
    for run in (snapshot.model, recorded):
        try:
            outputs.append(second_output(snapshot, run, trial.train, trial.example))
        except model_errors() as error:
            return f"the graph fails: {type(error).__name__}: {error}" if run is recorded else None
    return difference(outputs[0], outputs[1], tolerance=ROUNDING)


def _differ(trial: Trial, expected: Outcome, actual: Outcome) -> Mismatch | None:
    words = difference(expected.output, actual.output)
    return Mismatch(trial, words) if words else _of_names(trial, expected, expected.unequal(actual))


def _of_names(trial: Trial, expected: Outcome, names: list[str]) -> Mismatch | None:
    """The mismatch of buffers and gradients of these names."""
    for name in names:
        if name in expected.buffers:
            return Mismatch(trial, f"buffer {name!r} is left with other values", names=(name,))
    return Mismatch(trial, f"the gradient of {', '.join(names[:3])} differs", names=tuple(names)) if names else None


def _groups(expected: Outcome, actual: Outcome) -> Iterator[list[str]]:
    """Names of unequal gradients and buffers, in groups that can be in memory at once."""
    digests = {**actual.digests, **expected.digests}
    most = _GROUP * sum(digest.nbytes for digest in digests.values())
    group: list[str] = []
    held = 0
    for name in expected.unequal(actual):
        if group and held + digests[name].nbytes > most:
            yield group
            group, held = [], 0
        group.append(name)
        held += digests[name].nbytes
    if group:
        yield group


def _beyond_rounding(
    snapshot: Snapshot, graph: RecordedModule | Interpreter, trial: Trial, names: list[str], rounding: float
) -> Iterator[str]:
    """Run model and graph again, and give the names whose values differ by more than rounding."""
    # A gradient that is 0 except for rounding (of a query with only one key) has no digits to compare.
    digests, buffers = trial.expected.digests, trial.expected.buffers
    floor = _NOTHING * max((digest.largest for key, digest in digests.items() if key not in buffers), default=0.0)
    copies: dict[str, Tensor] = {}
    near = set()

    def keep(name: str, x: Tensor) -> None:
        copies[name] = x.clone()

    def compare(name: str, x: Tensor) -> None:
        if same_tensor(copies.pop(name, None), x, rounding, 0.0 if name in buffers else floor):
            near.add(name)

    for run, read in ((snapshot.model, keep), (graph, compare)):
        read_run(snapshot, run, trial.train, trial.example, read, wanted=names, backward=trial.backward)
    return (name for name in names if name not in near)
