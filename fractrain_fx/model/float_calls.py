"""Use of the original through a rewritten model: warn when it runs float layers, and decide what setting does.

A rewritten model looks attributes up on the original. Only this look-up installs a watch, so a training step costs
nothing more. A method is wrapped so that it warns when it runs a layer. In a submodule, modules that the graph never
calls get a hook, which warns once and is removed.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping
from types import FrameType, MethodType
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from fractrain_fx.capture.circumstances.notices import Notice
from fractrain_fx.capture.circumstances.structure import ADAPTERS_FIRST, is_adapter
from fractrain_fx.capture.source import outward, users_frame, warn
from fractrain_fx.capture.targets import call_name, is_product
from fractrain_fx.capture.trees import tensors_in
from fractrain_fx.errors import ModelError

__all__ = ["FloatCalls", "belongs_to_original", "require_no_part"]


class FloatCalls:
    """Watches the methods, and the modules ``uncalled`` by the graph, that are looked up on the original.

    ``look`` is called after each method, which may have changed the model.
    """

    def __init__(self, original: nn.Module, uncalled: Mapping[str, nn.Module], look: Callable[[], None]) -> None:
        self.original, self._look = original, look
        self._uncalled = {id(module): path for path, module in uncalled.items()}
        self._told: set[str] = set()
        self._armed: dict[str, list[Any]] = {}
        self._silent = False
        self._running = 0

    def looked_up(self, name: str, value: Any) -> Any:
        """The value of an attribute of the original, watched if it is a method or a module."""
        if isinstance(value, nn.Module):
            self._arm(name, value)
        elif isinstance(value, MethodType) and value.__self__ is self.original:
            return MethodType(self._watched(name, value.__func__), self.original)
        return value

    def be_silent(self) -> None:
        """Stop warning, because the user has the original now."""
        self._silent = True
        self.disarm()

    def disarm(self, name: str | None = None) -> None:
        """Remove the hooks of one look-up, or all hooks."""
        for lookup in [name] if name is not None else list(self._armed):
            for handle in self._armed.pop(lookup, ()):
                handle.remove()

    def tell(self, name: str, at: FrameType | None) -> None:
        """Warn of a call, once for each name that was looked up."""
        self.disarm(name)
        if self._knows(name):
            return
        self._told.add(name)
        if name == "generate":
            words = (
                f"generate() runs the float {type(self.original).__name__} with the trained weights, not the rewritten "
                "graph: its results, and every score of them, are not at trained precision, while the loss of "
                "model(...) is. model.restore().generate(...) says so explicitly. For text at trained precision call "
                "model(...) on the text so far, once for each token: a cache of keys and values would hold the "
                "precisions that gates chose for shorter texts"
            )
        else:
            words = (
                f"model.{name}(...) runs layers of the float original, with the trained weights and outside the "
                f"rewritten graph: not at trained precision, not gated, not in the cost. model.restore().{name}(...) "
                "says so explicitly; the rewritten model is called as model(...)"
            )
        warn(words, at)

    def heard(self, name: str) -> None:
        """Warn of a call of a module, unless a watched method or the original's forward makes it."""
        if self._running or self._silent:
            return
        callers = outward(sys._getframe(1))
        if not any(at.f_code.co_name == "forward" and at.f_locals.get("self") is self.original for at in callers):
            self.tell(name, users_frame())

    def _knows(self, name: str) -> bool:
        return self._silent or name in self._told

    def _watched(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(original: nn.Module, *args: Any, **kwargs: Any) -> Any:
            caller = users_frame()
            if name == "generate":
                self.tell(name, caller)
            self._running += 1
            try:
                with contextlib.nullcontext() if self._knows(name) else _Layers(lambda: self.tell(name, caller)):
                    result = method(original, *args, **kwargs)
            finally:
                self._running -= 1
            self._look()
            if isinstance(result, nn.Module):
                self._arm(f"{name}()", result)
            return result

        return call

    def _arm(self, name: str, module: nn.Module) -> None:
        if self._knows(name) or name in self._armed:
            return
        heard = [layer for layer in module.modules() if id(layer) in self._uncalled and _can_be_told_of(layer)]
        notice = Notice(self.heard, name)
        self._armed[name] = [layer.register_forward_pre_hook(notice) for layer in heard]


class _Layers(TorchFunctionMode):
    """Calls ``tell`` at the first product with a parameter."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self._tell: Callable[[], None] | None = tell

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        weighted = self._tell is not None and is_product(call_name(func))
        if weighted and any(isinstance(x, nn.Parameter) for x in tensors_in((args, kwargs or {}))):
            tell, self._tell = self._tell, None
            if tell is not None:
                tell()
        return func(*args, **(kwargs or {}))


def _can_be_told_of(module: nn.Module) -> bool:
    """Whether a module has parameters, and no hook of an earlier look-up."""
    waits = any(isinstance(hook, Notice) for hook in module._forward_pre_hooks.values())
    return not waits and next(module.parameters(), None) is not None


def belongs_to_original(model: nn.Module, original: nn.Module, name: str, read: bool) -> bool:
    """Whether an attribute to be set is a plain attribute of the original, which the model reads from there.

    ``read``: the original's forward reads it, although the original may not have it yet.
    """
    kept_by_torch = name in model._parameters or name in model._buffers or name in model._modules
    return not (kept_by_torch or name in vars(model) or hasattr(type(model), name)) and (
        read or hasattr(original, name)
    )


def require_no_part(model: nn.Module, name: str, value: Any) -> None:
    """Refuse to set an attribute that adds or replaces a module or parameter that the graph would not use.

    A parameter may replace one of the same shape, as assigning a checkpoint does.
    """
    before = model._modules.get(name, model._parameters.get(name))
    if value is before or (before is None and not isinstance(value, nn.Module | nn.Parameter)):
        return
    if isinstance(value, nn.Parameter) and isinstance(before, nn.Parameter) and value.shape == before.shape:
        return
    if is_adapter(value):
        raise ModelError(
            f"PEFT would replace {name}, a {type(before).__name__} that the rewritten graph was made for: "
            f"{ADAPTERS_FIRST}; take a new model, because this one may hold some of its adapters already"
        )
    if before is None:
        raise ModelError(
            f"{name} = {type(value).__name__}(...) would add a part to a rewritten model, whose graph does not run it: "
            "add it to the model before fractrainify, or hold it beside the rewritten model"
        )
    raise ModelError(
        f"{name} = {type(value).__name__}(...) would replace a {type(before).__name__} that the rewritten graph was "
        f"made for: set it on the original (plain = model.restore(); plain.{name} = ...) and call fractrainify(plain)"
    )
