"""The state that the checks of one model share, and the two ways in which a check fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.coverage.cases import Ready
from benchmarks.coverage.checks import Step
from fractrain_fx import FracConfig, FracModel, RunConfig
from fractrain_fx.capture import Recording
from fractrain_fx.capture.state import Snapshot
from fractrain_fx.config import Method
from fractrain_fx.rewriting import rewrite

__all__ = ["DifferentError", "FailedError", "Row", "Trial"]

Row = dict[str, Any]


class FailedError(Exception):
    """A check found something wrong."""


class DifferentError(FailedError):
    """The rewritten model computes something else than the original and raises no error."""


class Trial:
    """One model on its way through the checks.

    Args:
        build: makes the model and its batch.
    """

    def __init__(self, build: Callable[[], Ready]) -> None:
        self.build = build
        self.row: Row = {"checks": {}, "seconds": {}, "notes": []}

    ready: Ready
    before: Step
    after: Step
    had: set[str]
    asked: dict[str, Any]
    snapshot: Snapshot
    recording: Recording
    plain: FracModel
    rewritten: FracModel
    found: dict[str, torch.Tensor]
    expected: list[torch.Tensor]

    @property
    def model(self) -> nn.Module:
        return self.ready.model

    def timed(self, name: str, work: Callable[[], Any]) -> Any:
        """Note the processor time of one thread: other processes on the machine hardly change it."""
        start = time.process_time()
        result = work()
        self.row["seconds"][name] = round(time.process_time() - start, 3)
        return result

    def rewrite(self, recording: Recording, method: Method) -> FracModel:
        """Rewrite the model from a recording of it."""
        # Its gates skip blocks too; with or without built kernels.
        config = FracConfig.paper(method, run=RunConfig(backend="plain"))
        return FracModel(rewrite(self.model, recording, config))
