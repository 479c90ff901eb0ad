"""State that a forward changes: parameters; buffers, and weights of modules, that it sets (``self.mean = ...``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from fractrain_fx.capture.recording.constants import TensorWrite
from fractrain_fx.capture.recording.effects import version_of
from fractrain_fx.capture.recording.writer import Writer
from fractrain_fx.capture.source import is_within

__all__ = ["Written"]


class Written:
    """Writes a node for each buffer, or tensor of a module that stays one node, that code sets, in its order."""

    def __init__(self, model: nn.Module, writer: Writer) -> None:
        self._writer = writer
        self._owners = {id(module): (path, module) for path, module in model.named_modules()}
        self._present = {(path, name): x for path, each in self._owners.values() for name, x in each._buffers.items()}
        self._set: list[tuple[str, Node]] = []
        self._versions = [(name, p, version_of(p)) for name, p in model.named_parameters()]

    def setter(self, real: Callable[..., None]) -> Callable[..., None]:
        """Stand in for ``nn.Module.__setattr__``."""

        def write(module: nn.Module, name: str, value: Any) -> None:
            of_buffer = name in vars(module).get("_buffers", ())
            before = module._buffers[name] if of_buffer else None
            real(module, name, value)
            if self._writer.paused or not isinstance(value, Tensor):
                return
            if of_buffer:
                self._write_buffer(module, name, before, value)
            elif name in vars(module) and id(module) in self._owners:
                self._set.append((self._owners[id(module)][0], self._write(module, name, value)))

        return write

    def finish(self) -> None:
        """Write what was put into the dictionaries of buffers themselves; note the parameters that were changed.

        Only modules that the graph calls read attributes when it runs, such as the weight that is set on an LSTM.
        """
        changed = (name for name, p, version in self._versions if version_of(p) != version)
        self._writer.additions.written.update(changed)
        called = {str(node.target) for node in self._writer.graph.find_nodes(op="call_module")}
        for path, node in reversed(self._set):
            if not is_within(path, called) and not node._erased:
                self._writer.graph.erase_node(node)
        for path, module in self._owners.values():
            for name, value in module._buffers.items() if not is_within(path, called) else ():
                if (path, name) in self._present and value is not None and self._writer.known(value) is not None:
                    self._write_buffer(module, name, self._present[path, name], value)

    def _write_buffer(self, module: nn.Module, name: str, before: Tensor | None, value: Tensor) -> None:
        path, _ = self._owners.get(id(module), (None, None))
        if path is None or value is self._present.get((path, name)):
            return
        self._present[path, name] = value
        if before is None or (before.shape, before.dtype) != (value.shape, value.dtype):
            change = "makes" if before is None else "changes the shape or the type of"
            cause = f"it {change} buffer {name!r} (if only the first call does: call the model once before)"
            self._writer.block(cause)
        else:
            self._write(module, name, value)

    def _write(self, module: nn.Module, name: str, value: Tensor) -> Node:
        path, _ = self._owners[id(module)]
        target = self._writer.additions.kept("written", (path, name), lambda: TensorWrite(module, path, name))
        return self._writer.create("call_module", target, (self._writer.node_of(value),), effect=True)
