"""The files that an input passes in a training step, before backward: a reader opens so many to follow one product."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fractrain_fx
from fractrain_fx import Engine, FracConfig, Precision
from fractrain_fx.config import RunConfig
from tests.build import rewritten

PACKAGE = Path(fractrain_fx.__file__).parent
SAMPLES = 7  # no layer has this width, so a tensor with it was computed from the input


_STATIC = FracConfig(method="static", precision=Precision(8, 8))
_CONFIGS = {
    "plain": replace(_STATIC, run=RunConfig(backend="plain")),
    "kernels": replace(_STATIC, run=RunConfig(backend="cpu")),
    "per_product": replace(_STATIC, format="mx", run=RunConfig(backend="cpu")),
    "codes": FracConfig(method="fractrain", run=RunConfig(backend="codes-always")),
    "torchao": replace(_STATIC, format="fp8", run=RunConfig(torchao=True)),
}


@pytest.mark.parametrize("backend", _CONFIGS)
def test_an_input_passes_few_files(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "torchao":
        pytest.importorskip("torchao")
    monkeypatch.delenv("FRACTRAIN_BACKEND", raising=False)
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    x = torch.randn(SAMPLES, 32)
    model = rewritten(net, x, config=_CONFIGS[backend])
    engine = Engine(model, epochs=20)
    for _ in range(2):
        engine.loss(model(x).sum()).backward()
    with _files_of_input() as files:
        model(x)
    file = "plain" if backend == "kernels" else backend
    assert {"model/frac_model.py", f"execution/backends/{file}.py"} <= files
    assert len(files) <= (20 if backend == "plain" else 24), sorted(files)


@contextmanager
def _files_of_input() -> Iterator[set[str]]:
    """The files of the package with a function that takes or returns a tensor computed from the input."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, result: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            given = [value for name, value in frame.f_locals.items() if name != "self"]
        elif event == "return" and path.is_relative_to(PACKAGE):
            given = [result]
        else:
            return
        if _holds_samples(given):
            found.add(path.relative_to(PACKAGE).as_posix())

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def _holds_samples(value: Any, depth: int = 0) -> bool:
    if isinstance(value, Tensor):
        return SAMPLES in value.shape
    if depth > 3:
        return False
    if isinstance(value, (tuple, list)):
        return any(_holds_samples(each, depth + 1) for each in value)
    if isinstance(value, dict):
        return _holds_samples(list(value.values()), depth)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value)]
        return _holds_samples([getattr(value, name, None) for name in names], depth)
    return False
