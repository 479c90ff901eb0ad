"""Run a part of the model again in backward instead of keeping its activations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from fractrain_fx.capture import TensorWrite
from fractrain_fx.capture.recording.regions import regions_left

__all__ = ["Recomputed"]


class Recomputed(nn.Module):
    """A part of a running graph under ``torch.utils.checkpoint``: backward runs it again to get its activations.

    The second run starts from the random generators and the buffers of the first, and leaves both as it found them. So
    running averages of norms and ranges of quantizers move once a step, and dropout drops the same values.

    Args:
        part: the part, which may be compiled.
        graph: the part's graph.
        modules: paths of modules in it that may change their buffers.
        buffers: paths of other buffers that it may change.
        options: of ``torch.utils.checkpoint.checkpoint``.
    """

    def __init__(
        self,
        part: nn.Module,
        graph: GraphModule,
        modules: Sequence[str],
        buffers: Sequence[str],
        options: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.training = graph.training
        # In a tuple, which torch does not register as children: the modules of the part belong to the model.
        self._part = part, graph
        self._modules_with_state, self._buffers_with_state = tuple(modules), tuple(buffers)
        self._options = dict(options)
        called = (graph.get_submodule(str(node.target)) for node in graph.graph.find_nodes(op="call_module"))
        self._replaces = any(isinstance(module, TensorWrite) for module in called)

    def forward(self, *args: Any) -> Any:
        """Run the part; without gradients, or if torch compiles, nothing else."""
        part = self._part[0]
        if torch.compiler.is_compiling():
            if self._replaces:  # the compiler would refuse to replace a buffer in a part that runs twice
                return part(*args)
            return checkpoint(part, *args, use_reentrant=False, **self._options)
        before = _Before(self._state())

        def run(*args: Any) -> Any:
            with regions_left():
                return part(*args)

        def contexts() -> tuple[Any, Any]:
            return contextlib.nullcontext(), before

        return checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **self._options)

    def _state(self) -> Iterator[tuple[dict[str, Tensor | None], str]]:
        graph = self._part[1]
        for path in self._modules_with_state:
            for module in graph.get_submodule(path).modules():
                yield from ((module._buffers, name) for name in module._buffers)
        for path in self._buffers_with_state:
            owner, _, name = path.rpartition(".")
            yield graph.get_submodule(owner)._buffers, name


class _Before:
    """Puts copies of buffers as they were in the place of the buffers, while the context is open.

    The buffers themselves are not written: autograd may have saved them, and would see another version.
    """

    def __init__(self, state: Iterator[tuple[dict[str, Tensor | None], str]]) -> None:
        self._values = [(holder, name, x.clone()) for holder, name in state if (x := holder[name]) is not None]
        self._present: list[Tensor | None] = []

    def __enter__(self) -> None:
        self._present = [holder[name] for holder, name, _ in self._values]
        copies: dict[int, Tensor] = {}
        for (holder, name, before), now in zip(self._values, self._present, strict=True):
            # A buffer with two names stays one tensor; a third run, with the graph retained, needs the copy once more.
            holder[name] = copies.setdefault(id(now), before.clone())

    def __exit__(self, *_: object) -> None:
        for (holder, name, _before), now in zip(self._values, self._present, strict=True):
            holder[name] = now
