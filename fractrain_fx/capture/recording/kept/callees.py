"""Functions and methods kept as one call each: values decide what happens inside, and no gradient flows through them.

Functions that compute positions from the sizes of images are an example: a graph cannot hold their loops over values,
but they can run again at every call, so that the module that calls them need not stay one node. So can functions that
draw with numpy, as those that mask frames of sound.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fractrain_fx.capture.trees import holds_tensor, leaves_in, map_tree
from fractrain_fx.errors import InputError

__all__ = ["Callee", "Method", "callees", "only_constants", "own_containers", "placed", "require_nothing"]


@dataclass(frozen=True)
class Callee:
    """A function or method that a module's forward calls by name.

    ``owner`` is the path of the module whose method it is, or the name of the Python module that calls the function.
    """

    owner: str
    name: str
    method: bool

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}()".lstrip(".")


class Method(nn.Module):
    """Calls a method of another module, which is held but not registered, so that its parameters keep their names."""

    _owner: tuple[nn.Module]

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        self.name = name
        self._owner = (owner,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        return own_containers(getattr(self._owner[0], self.name))(*args, **kwargs)

    def extra_repr(self) -> str:
        """The class and name of the method."""
        return f"{type(self._owner[0]).__name__}.{self.name}"


def callees(frame: FrameType | None, paths: dict[int, str]) -> Iterator[Callee]:
    """Functions and methods that run, innermost first, up to the forward of the innermost module.

    ``paths`` are those of the model's modules, by identity.
    """
    while frame is not None and frame.f_code.co_name != "forward":
        code, caller = frame.f_code, frame.f_back
        if caller is None or str(caller.f_globals.get("__name__", "")).startswith("torch.nn.modules"):
            return
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(first, nn.Module):
            if id(first) in paths and _is_function(getattr(type(first), code.co_name, None), code):
                yield Callee(paths[id(first)], code.co_name, method=True)
        else:
            # Found by its name in the caller's file, because that name will be replaced.
            for name, value in list(caller.f_globals.items()):
                if _is_function(value, code) and name in caller.f_code.co_names:
                    yield Callee(str(caller.f_globals["__name__"]), name, method=False)
        frame = caller


def _is_function(value: Any, code: Any) -> bool:
    # Only of what can be called: a configuration may answer the question for an attribute with any error.
    while callable(value):
        if getattr(value, "__code__", None) is code:
            return True
        value = getattr(value, "__wrapped__", None)
    return False


def only_constants(result: Any) -> bool:
    """Whether a call returned tensors without a gradient and nothing else, or nothing at all."""
    fixed = all(part is None or (isinstance(part, Tensor) and not part.requires_grad) for part in leaves_in(result))
    return fixed and (result is None or holds_tensor(result))


def require_nothing(result: Any) -> None:
    """Raise if a call gives something that gave nothing when it was recorded: the graph lacks the code that uses it."""
    if result is not None:
        raise InputError(
            f"a function that returned None when the model was recorded returns a {type(result).__name__} for these "
            "inputs: let it return a tensor for all inputs, or move the code that calls it into a submodule"
        )


def own_containers(real: Callable[..., Any]) -> Callable[..., Any]:
    """The same function on copies of lists and dictionaries: it may change them, and those of a graph are frozen.

    It gives a tensor instead of an array of numpy, which would be a constant of the graph.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        own_args, own_kwargs = map_tree((args, kwargs), lambda part: part)
        result = real(*own_args, **own_kwargs)
        return torch.from_numpy(result) if isinstance(result, np.ndarray) else result

    return call


def placed(callee: Callee, model: nn.Module) -> tuple[Any, Callable[..., Any]]:
    """The object on which a callee is looked up when it is called, and the function that is found there."""
    owner: Any = model.get_submodule(callee.owner) if callee.method else sys.modules[callee.owner]
    return owner, getattr(owner, callee.name)
