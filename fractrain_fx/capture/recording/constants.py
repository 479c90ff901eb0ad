"""Modules that capture adds under ``frac``: tensors without a module, values that depend on the mode, buffers."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor, nn

from fractrain_fx.capture.compare import equal

__all__ = ["WRITTEN", "Additions", "ModeSwitch", "TensorWrite"]

WRITTEN = "written"
"""Key of a recorded module's ``meta``: names of the parameters that its forward changes."""


class ModeSwitch(nn.Module):
    """Gives ``train_value`` while training, else ``eval_value``: two recordings differed in this constant."""

    def __init__(self, train_value: Any, eval_value: Any) -> None:
        super().__init__()
        self.train_value = train_value
        self.eval_value = eval_value

    def forward(self) -> Any:
        """The value for the present mode."""
        return self.train_value if self.training else self.eval_value

    def extra_repr(self) -> str:
        """Both values."""
        return f"train={self.train_value!r}, eval={self.eval_value!r}"


class TensorWrite(nn.Module):
    """Sets a buffer, or another tensor, of a module that is held but not registered."""

    _owner: tuple[nn.Module]

    def __init__(self, owner: nn.Module, path: str, name: str) -> None:
        super().__init__()
        self.place = f"{path}.{name}".lstrip(".")
        self._owner = (owner,)

    def forward(self, value: Tensor) -> None:
        """Set the tensor. A parameter, which dropout returns in evaluation, would become one more parameter."""
        value = value.view_as(value) if isinstance(value, nn.Parameter) else value
        setattr(self._owner[0], self.place.rpartition(".")[2], value)

    def extra_repr(self) -> str:
        """The path of the tensor."""
        return self.place


class Additions:
    """The ``frac`` child of a recording, filled while recording.

    ``root`` becomes ``frac``; ``constants``, ``mode``, ``methods`` and ``written`` appear in it when first needed.
    ``Additions.written`` has the names of the parameters that the forward changes. ``held``: identities of the tensors
    that the model holds.
    """

    def __init__(self, held: Container[int]) -> None:
        self._held = held
        self.root = nn.Module()
        self.written: set[str] = set()
        self._constants: dict[int, str] = {}
        self._switches: list[tuple[Any, Any, str]] = []
        self._kept: dict[tuple[str, Any], str] = {}

    def constant(self, value: Tensor) -> str:
        """Keep a tensor that belongs to no module as a non-persistent buffer; returns its qualified name."""
        if id(value) not in self._constants:
            holder = self._child("constants")
            name = f"c{len(self._constants)}"
            holder.register_buffer(name, value, persistent=False)
            self._constants[id(value)] = f"frac.constants.{name}"
        return self._constants[id(value)]

    def holds(self, value: Tensor) -> bool:
        """Whether a tensor is the model's own."""
        return id(value) in self._held

    def tensor(self, name: str) -> Tensor:
        """The constant of a qualified name."""
        return self.root.get_buffer(name.partition(".")[2])

    def switch(self, train_value: Any, eval_value: Any) -> str:
        """Add a :class:`ModeSwitch` of two values; returns its qualified name."""
        for known_train, known_eval, path in self._switches:
            if equal(known_train, train_value) and equal(known_eval, eval_value):
                return path
        name = str(len(self._switches))
        self._child("mode").add_module(name, ModeSwitch(train_value, eval_value))
        self._switches.append((train_value, eval_value, f"frac.mode.{name}"))
        return f"frac.mode.{name}"

    def kept(self, kind: str, key: Any, make: Callable[[], nn.Module]) -> str:
        """Add the module that ``make`` gives for ``key`` to those of its kind, once; returns its qualified name."""
        if (kind, key) not in self._kept:
            child = self._child(kind)
            name = str(len(child._modules))
            child.add_module(name, make())
            self._kept[kind, key] = f"frac.{kind}.{name}"
        return self._kept[kind, key]

    def same(self, a: str, b: str) -> bool:
        """Whether two ``get_attr`` targets are the same tensor, or constants of one content that each run made.

        Tensors that the model holds may be changed later, each for itself.
        """
        if a == b or not (a.startswith("frac.constants.") and b.startswith("frac.constants.")):
            return a == b
        x, y = map(self.tensor, (a, b))
        if self.holds(x) or self.holds(y):
            return False
        comparable = not x.is_meta and not x.is_nested and not y.is_nested
        return x.dtype == y.dtype and x.device == y.device and comparable and torch.equal(x, y)

    def drop_unused(self, targets: set[str]) -> None:
        """Forget constants that no ``get_attr`` among ``targets`` reads."""
        for path in self._constants.values():
            if path not in targets:
                self.root.get_submodule("constants")._buffers.pop(path.rpartition(".")[2], None)

    def _child(self, name: str) -> nn.Module:
        if name not in self.root._modules:
            self.root.add_module(name, nn.Module())
        return self.root.get_submodule(name)
