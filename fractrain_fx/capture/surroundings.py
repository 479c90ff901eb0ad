"""How a call is made that a model is recorded for: the modes of its parts, and the gradient mode around it."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import attention
from torch.nn.attention import SDPBackend

from fractrain_fx.capture.asked import AUTOCAST, AUTOCAST_TYPE, GRADIENTS, INFERENCE, Circumstance, Setting
from fractrain_fx.capture.replaced import Replacement, replaced
from fractrain_fx.capture.sizes.standins import files_of
from fractrain_fx.capture.source import by_capture, by_library, model_line

if TYPE_CHECKING:
    from torch.fx import Node

    from fractrain_fx.capture.recording.ambient import Ambient

__all__ = ["Surroundings"]

_GRADIENT_MODES = (torch.enable_grad, torch.set_grad_enabled)


@dataclass
class Surroundings:
    """How a call is made.

    A model is recorded and compared with gradients on, because a graph must be right with gradients. Code that asks for
    the gradient mode is told that of the call, ``grad``. In the mode ``mode`` (training or not) each part keeps the
    mode that it has when recording begins; in the other one, and in both if ``None``, all parts follow the model.
    ``left_off`` is file and line of code that leaves gradients switched off at the end of forward; empty if none does.
    """

    mode: bool | None = None
    grad: bool = True
    inference: bool = False
    left_off: str = ""
    _watcher: Ambient | None = None
    _regions: list[tuple[Any, Node | None]] = field(default_factory=list)

    @classmethod
    def present(cls, mode: bool) -> Surroundings:
        """The surroundings of a call that is made now in this mode."""
        return cls(mode, torch.is_grad_enabled(), torch.is_inference_mode_enabled())

    @contextlib.contextmanager
    def watched(self, watcher: Ambient) -> Iterator[None]:
        """Tell a watcher what code does with the gradient mode and autocast inside."""
        self._watcher = watcher
        try:
            yield
            if not torch.is_grad_enabled():
                self.left_off = self.left_off or model_line() or "forward"
        finally:
            self._watcher = None
            torch._C._set_grad_enabled(True)

    @contextlib.contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Answer the model's code inside as it would be answered in the call. Torch's own code gets torch's answers.

        The functions are replaced in torch, in its C module, and where files of the model imported them by name.
        """
        # The compiler knows torch's functions by what they are when it is imported, and comparing runs imports it.
        importlib.import_module("torch._dynamo")
        answers = {
            "is_grad_enabled": self._switch(torch.is_grad_enabled, GRADIENTS, self.grad),
            "is_inference_mode_enabled": self._switch(torch.is_inference_mode_enabled, INFERENCE, self.inference),
            "is_autocast_enabled": self._autocast(torch.is_autocast_enabled, AUTOCAST),
            "get_autocast_dtype": self._autocast(torch.get_autocast_dtype, AUTOCAST_TYPE),
            "is_autocast_cpu_enabled": self._autocast(torch.is_autocast_cpu_enabled, AUTOCAST, "cpu"),
            "get_autocast_cpu_dtype": self._autocast(torch.get_autocast_cpu_dtype, AUTOCAST_TYPE, "cpu"),
            "get_autocast_gpu_dtype": self._autocast(torch.get_autocast_gpu_dtype, AUTOCAST_TYPE),
        }
        real = {id(getattr(torch, name)): name for name in answers}
        places = [
            (owner, name, answers[real[id(value)]])
            for owner in (torch, torch._C, *files_of(model))
            for name, value in list(vars(owner).items())
            if id(value) in real
        ]
        for kind in (*_GRADIENT_MODES, torch.autocast):
            places += [
                (kind, "__enter__", self._entered(kind.__enter__)),
                (kind, "__exit__", self._left(kind.__exit__)),
            ]
        chosen: Replacement = (attention, "_sdpa_kernel", self._attention(attention._sdpa_kernel))
        with replaced(*places, chosen):
            yield

    def _switch(self, real: Callable[[], bool], switch: Setting, of_call: bool) -> Callable[[], bool]:
        def ask() -> bool:
            frame, value = sys._getframe(1), real()
            # In a region in which the model itself switched gradients on or off, the call does not matter.
            switched = any(isinstance(region, _GRADIENT_MODES) for region, _ in self._regions)
            by_model = value is not (switch is GRADIENTS) or (switch is GRADIENTS and switched)
            if by_library(frame) or by_model:
                return value
            self._told(switch, of_call, frame)
            return of_call

        return ask

    def _told(self, circumstance: Circumstance, value: Any, frame: FrameType) -> None:
        if self._watcher is not None:
            self._watcher.read(circumstance, value, frame)

    def _autocast(self, real: Callable[..., Any], name: str, device: str = "cuda") -> Callable[..., Any]:
        def ask(*devices: str) -> Any:
            frame, value = sys._getframe(1), real(*devices)
            if not by_library(frame):
                self._told(Setting(name, (*devices, device)[0]), value, frame)
            return value

        return ask

    def _entered(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def enter(region: Any) -> Any:
            result = real(region)
            if getattr(region, "mode", True) and not by_capture(sys._getframe(1)):
                self._regions.append((region, self._watcher.enter_region(region) if self._watcher else None))
            return result

        return enter

    def _left(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def leave(region: Any, *error: Any) -> Any:
            self._close(region)
            return real(region, *error)

        return leave

    def _attention(self, real: Callable[..., None]) -> Callable[..., None]:
        """What ``sdpa_kernel`` calls at its start and at its end, from the same frame."""

        def choose(backends: Iterable[SDPBackend], set_priority: bool = False) -> None:
            real(backends, set_priority)
            caller = sys._getframe(1)
            if not by_capture(caller) and not self._close(caller):
                entry = self._watcher.enter_attention(backends, set_priority) if self._watcher else None
                self._regions.append((caller, entry))

        return choose

    def _close(self, region: Any) -> bool:
        """Note the end of a region; tells whether it was open."""
        opened = next((entry for entry in reversed(self._regions) if entry[0] is region), None)
        if opened is None:
            return False
        self._regions.remove(opened)
        if self._watcher is not None:
            self._watcher.leave(opened[1])
        return True
