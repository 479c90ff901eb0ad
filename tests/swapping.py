"""What torchao computes in tests, and where."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fractrain_fx import FracConfig, RunConfig
from fractrain_fx.config import RECIPES
from fractrain_fx.execution.torchao_kernels import Kind, refusal

__all__ = ["KINDS", "place", "settings"]

KINDS: tuple[Kind, ...] = ("int8", "float8")

_RECIPES = {"int8": "int8", "float8": "fp8", "mxfp8": "mxfp8"}


def settings(kind: Kind, *, simulated: bool = False, **options: Any) -> FracConfig:
    """A configuration that trains in numbers of torchao, or ``simulated`` in the same numbers."""
    recipe, run = _RECIPES[kind], RunConfig(backend="plain", torchao=not simulated)
    given: dict[str, Any] = {"method": "static"} | options
    return FracConfig(format=RECIPES[recipe].format, recipe=recipe, run=run, **given)


def place(kind: Kind) -> torch.device:
    """A GPU that can multiply so, else the CPU; the test is skipped without torchao."""
    pytest.importorskip("torchao")
    gpu = torch.device("cuda")
    return gpu if torch.cuda.is_available() and refusal(kind, gpu) is None else torch.device("cpu")
