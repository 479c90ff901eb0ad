"""Where the tests of torchao's layers run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fractrain_fx.execution.torchao_devices import refusal

__all__ = ["KINDS", "place"]

KINDS = ("int8", "float8")


def place(kind: Any) -> torch.device:
    """A GPU that can multiply so, else the CPU; the test is skipped without torchao."""
    pytest.importorskip("torchao")
    gpu = torch.device("cuda")
    return gpu if torch.cuda.is_available() and refusal(kind, gpu) is None else torch.device("cpu")
