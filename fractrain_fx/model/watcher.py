"""The side of a rewritten model that may be watched: who is asked before a training step, and shown the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from fractrain_fx.capture import RecordedModule

__all__ = ["Watcher", "counts_step", "watched_step"]


class Watcher(Protocol):
    """Watches some training steps of a model (:class:`fractrain_fx.numerics.Watch` is one)."""

    def before_compiled(self) -> None:
        """Count a step that is about to run as compiled code; a watched one runs eagerly instead."""
        ...

    def run_eagerly(self) -> None:
        """Make the next call run in eager mode although it was compiled."""
        ...

    def begin(self) -> bool:
        """Count a step; whether it is watched."""
        ...

    def watching(self, graph_module: RecordedModule, hold: bool) -> AbstractContextManager[None]:
        """Watch the call of a graph inside; ``hold`` keeps to eager mode until backward has ended."""
        ...

    def note_choices(self, choices: Mapping[str, Tensor]) -> None:
        """Keep the choices of the gates in that call."""
        ...

    def describe(self) -> str | None:
        """In a sentence, the op whose numbers were first not finite, or furthest out, in the last watched step."""
        ...


def counts_step(watcher: Watcher | None, training: bool) -> TypeGuard[Watcher]:
    """Whether a call now is a step that a watcher counts."""
    return watcher is not None and training and torch.is_grad_enabled()


@contextmanager
def watched_step(
    watcher: Watcher, graph: Callable[[], RecordedModule], segments_compiled: bool, recomputed: bool
) -> Iterator[None]:
    """Count a step; if it is to be watched, watch the call inside; ``graph`` gives the copy that runs.

    ``segments_compiled``: the copy runs in compiled segments. ``recomputed``: backward runs segments again, which then
    must run as they ran at first.
    """
    if not watcher.begin():
        yield
        return
    if segments_compiled:
        watcher.run_eagerly()
    with watcher.watching(graph(), hold=segments_compiled and recomputed):
        yield
