"""Attributes that a forward changes for its next call, whereas a graph starts every call from the recorded values."""

from __future__ import annotations

from typing import Any

import torch

from fractrain_fx.capture.circumstances.attributes import Access
from fractrain_fx.capture.circumstances.equality import copied, same
from fractrain_fx.capture.compare import difference
from fractrain_fx.capture.inputs.call import Example
from fractrain_fx.capture.inputs.data import has_data
from fractrain_fx.capture.recording.patch import plain_paths
from fractrain_fx.capture.recording.writer import Obstacle
from fractrain_fx.capture.state import Snapshot, seeded

__all__ = ["carried"]


def carried(
    snapshot: Snapshot, example: Example, train: bool, changed: list[Access]
) -> tuple[list[Obstacle], list[str]]:
    """Find modules that must stay one call, or need a warning, because of attributes that a recorded run changed.

    A table that is made at the first call and kept needs neither: a second call finds it and gives the same output.

    Args:
        snapshot: the model, restored after each run.
        example: the call to make twice.
        train: the mode.
        changed: attributes that the run read and then changed.

    Returns:
        Obstacles, and warnings about counters that nothing else reads.
    """
    if not changed:
        return [], []
    try:
        moving, differs = _twice(snapshot, example, train, changed)
    except Exception:  # a second call that fails tells nothing about the first
        return [], []
    counters = [each for each in moving if each.only_counts]
    blamed = [each for each in (changed if differs else moving) if each not in counters]
    if differs and not blamed:
        blamed, counters = counters, []
    obstacles = []
    for each in blamed:
        cause = f"its forward changes {each.place} from call to call ({each.line}), which a graph cannot repeat"
        obstacles += [Obstacle(path, cause, line=each.line) for path in sorted(each.writers or each.readers)[-1:]]
    notes = [
        f"forward counts in {each.place} ({each.line}), and no other line of it reads the count: the rewritten model "
        "does not count"
        for each in counters
    ]
    return obstacles, notes


def _twice(snapshot: Snapshot, example: Example, train: bool, changed: list[Access]) -> tuple[list[Access], bool]:
    """Attributes that a second call on the same inputs changes again, and whether its output differs."""
    model = snapshot.model
    outputs: list[Any] = []
    after: list[list[Any]] = []
    with snapshot.preserved(), plain_paths(), torch.no_grad():
        snapshot.set_mode(train)
        for _ in range(2):
            snapshot.restore_tensors()
            call = example.renewed()
            with seeded():
                outputs.append(model(*call.args, **call.kwargs))
            after.append([copied(each.present()) for each in changed])
    moving = [each for each, *values in zip(changed, *after, strict=True) if _moves(*values)]
    return moving, has_data(model) and difference(*outputs) is not None


def _moves(first: Any, second: Any) -> bool:
    # A container that only grows may be a log. If the model reads it, the outputs differ.
    return not isinstance(first, list | dict | set) and not same(first, second)
