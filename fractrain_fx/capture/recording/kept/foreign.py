"""Library functions that compute outside torch: each becomes one node, and runs again at every call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor

from fractrain_fx.capture.recording.recorder import Recorder
from fractrain_fx.capture.replaced import replaced
from fractrain_fx.capture.sizes.symbolic import plain
from fractrain_fx.capture.state import seeded
from fractrain_fx.capture.targets import function_node

__all__ = ["foreign_functions", "is_foreign", "same_draws"]

# SpecAugment of transformers' speech models: draws the frames to mask with numpy, and returns an array.
_ARRAYS = ("_compute_mask_indices",)


def foreign_functions(recorder: Recorder) -> Iterator[tuple[ModuleType, str, Callable[..., Any]]]:
    """Owner, name and replacement of each such function that is loaded.

    A graph that kept the array of one run as a constant would mask the same frames of every batch.
    """
    for module, name in _loaded():
        yield module, name, _written(recorder, vars(module)[name], name)


def same_draws() -> AbstractContextManager[None]:
    """Make these functions draw the same numbers at each call inside, whatever the generators would give."""
    return replaced(*((module, name, _seeded(vars(module)[name])) for module, name in _loaded()))


def _seeded(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with seeded():
            return real(*args, **kwargs)

    return call


def _loaded() -> Iterator[tuple[ModuleType, str]]:
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("transformers.models."):
            yield from ((module, name) for name in _ARRAYS if name in vars(module))


def is_foreign(frame: FrameType | None) -> bool:
    """Whether such a function is among the callers of ``frame``, up to the first forward."""
    while frame is not None and frame.f_code.co_name != "forward":
        if frame.f_code.co_name in _ARRAYS and str(frame.f_globals.get("__name__")).startswith("transformers.models."):
            return True
        frame = frame.f_back
    return False


def _written(recorder: Recorder, real: Callable[..., Any], name: str) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Tensor:
        return torch.from_numpy(real(*args, **kwargs))

    def call(*args: Any, **kwargs: Any) -> Any:
        if recorder.paused:
            return real(*args, **kwargs)
        watched = recorder.watch(args, kwargs)
        with recorder.pause():
            result = compute(*plain(args), **plain(kwargs))
            target = function_node(compute, name.strip("_"))
            return recorder.write("call_function", target, args, kwargs, result, watched, random=True)

    return call
