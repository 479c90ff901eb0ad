"""Run a model and leave no trace: buffers, flags, attributes, gradients and random generators as before."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["preserved", "preserved_random_state", "seeded"]


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Put back what running ``model`` changes: its modules' attributes, values of buffers, and random generators."""
    modules = list(model.modules())
    attributes = [_snapshot(module) for module in modules]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with preserved_random_state():
        try:
            yield
        finally:
            for module, saved in zip(modules, attributes, strict=True):
                _restore(module, saved)
            with torch.no_grad():
                for buffer, before in buffers:
                    if not buffer.is_meta and not torch.equal(buffer, before):
                        buffer.copy_(before)


@contextlib.contextmanager
def preserved_random_state() -> Iterator[None]:
    """Put back the generators of Python, numpy and torch on every device in use."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = list(range(len(torch.cuda.default_generators)))
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextlib.contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Start all generators from ``seed`` inside."""
    with preserved_random_state():
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        yield


def _snapshot(module: nn.Module) -> dict[str, Any]:
    """A module's attributes; containers among them are copied, as a forward may fill them (caches of tables, say)."""
    return {name: (value, _contents(value)) for name, value in vars(module).items()}


def _contents(value: Any) -> Any:
    return value.copy() if isinstance(value, (dict, list, set)) else None


def _restore(module: nn.Module, saved: dict[str, tuple[Any, Any]]) -> None:
    attributes = vars(module)
    for name in [name for name in attributes if name not in saved]:
        del attributes[name]
    for name, (value, contents) in saved.items():
        attributes[name] = value
        if contents is not None and not _same_items(value, contents):
            value.clear()
            value.extend(contents) if isinstance(value, list) else value.update(contents)


def _same_items(value: Any, contents: Any) -> bool:
    """Whether a container holds the very objects it held before; equality would compare tensors."""
    if isinstance(value, dict):
        return list(value) == list(contents) and all(value[key] is contents[key] for key in contents)
    if isinstance(value, list):
        return len(value) == len(contents) and all(a is b for a, b in zip(value, contents, strict=True))
    return bool(value == contents)
