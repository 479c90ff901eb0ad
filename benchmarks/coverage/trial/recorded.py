"""The first checks: the model is built, trains in float, and is recorded as a graph."""

from __future__ import annotations

from typing import Any

from benchmarks.coverage.checks import step
from benchmarks.coverage.trial.state import FailedError, Trial
from fractrain_fx.capture import Recording, record
from fractrain_fx.capture.inputs.call import describe_call
from fractrain_fx.capture.state import Snapshot, seeded

__all__ = ["build", "capture", "forward"]


def build(trial: Trial) -> None:
    """The model is built without a download."""
    with seeded():
        trial.ready = trial.timed("build", trial.build)
    # The recording stands for a call without caches, because caches only serve to generate text.
    trial.asked = describe_call(trial.model, trial.ready.args, trial.ready.kwargs).kwargs
    trial.row["how"] = trial.ready.how
    trial.row["parameters"] = sum(p.numel() for p in trial.model.parameters())


def forward(trial: Trial) -> None:
    """The original model trains on its inputs: its loss and at least one gradient are finite."""
    with Snapshot(trial.model).preserved():
        trial.before = trial.timed("step", lambda: step(trial.model, trial.ready.args, trial.asked, 7))
    trial.model.zero_grad(set_to_none=True)
    trial.had = {name for name, g in trial.before.gradients.items() if bool(g.isfinite().all())}
    if not trial.before.gradients:
        raise FailedError("no parameter of the model itself gets a gradient")
    if not trial.had:
        raise FailedError("every gradient of the model itself is infinite or NaN")


def capture(trial: Trial) -> None:
    """The model is recorded, and the recording agrees with it. The time covers recording both modes, without checks."""
    inputs = trial.ready.args, trial.ready.kwargs
    trial.recording = trial.timed("checked", lambda: record(trial.model, *inputs))
    trial.timed("capture", lambda: record(trial.model, *inputs, check=False))
    trial.snapshot = Snapshot(trial.model)  # including the tables that the model filled while it was recorded
    recording = trial.recording
    trial.row["nodes"] = len(recording.train.graph.nodes)
    trial.row["graphs"] = 1 if recording.eval is recording.train else 2
    trial.row["fixed_batch"] = recording.fixed_batch
    trial.row["leaves"] = _leaves(recording)
    if not recording.checked:
        raise FailedError("the recording was not compared with the model")


def _leaves(recording: Recording) -> list[dict[str, Any]]:
    """For each reason to keep modules as one node: their number, the first, and their share of all matrix elements."""
    whole = sum(p.numel() for p in recording.train.parameters() if p.ndim >= 2) or 1
    rows: dict[str, dict[str, Any]] = {}
    for path, reason in recording.leaves.items():
        row = rows.setdefault(reason[:300], {"reason": reason[:300], "count": 0, "first": path, "share": 0.0})
        row["count"] += 1
        elements = sum(p.numel() for p in recording.train.get_submodule(path).parameters() if p.ndim >= 2)
        row["share"] = round(row["share"] + elements / whole, 4)
    return list(rows.values())
