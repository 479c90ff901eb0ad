"""Regions of a graph in which a setting of torch is another one: autocast, gradients, the kernels of attention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from traceback import walk_tb
from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import GraphModule, Interpreter, Node
from torch.nn import attention
from torch.nn.attention import SDPBackend

__all__ = ["REGIONS", "REGION_EDGES", "NodeByNode", "enter_attention", "enter_gradients", "regions_left"]

_HANDLED = "_regions_left"


def enter_gradients(mode: bool) -> bool:
    """Switch gradients on or off; returns whether they were on."""
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(mode)
    return before


def leave_gradients(before: bool) -> None:
    """Put the gradient mode back."""
    torch._C._set_grad_enabled(before)


def enter_attention(backends: Sequence[int], by_priority: bool) -> tuple[Sequence[SDPBackend], bool]:
    """Choose the kernels of ``scaled_dot_product_attention``; returns what ``leave_attention`` puts back."""
    before = attention._cur_sdpa_kernel_backends(with_priority=by_priority)
    attention._sdpa_kernel([SDPBackend(backend) for backend in backends], by_priority)
    return before, by_priority


def leave_attention(before: tuple[Sequence[SDPBackend], bool]) -> None:
    """Put the kernels back."""
    attention._sdpa_kernel(*before)


REGIONS: dict[Any, Callable[..., Any]] = {
    _enter_autocast: _exit_autocast,
    enter_gradients: leave_gradients,
    enter_attention: leave_attention,
}
"""The call that begins a region, and the call that ends it."""

REGION_EDGES = frozenset({*REGIONS, *REGIONS.values()})
"""Calls that begin or end a region."""


@contextlib.contextmanager
def regions_left() -> Iterator[None]:
    """Leave the regions in which a graph stops before their end: at an error, or when enough is recomputed."""
    try:
        yield
    except BaseException as error:
        handled: set[int] = error.__dict__.setdefault(_HANDLED, set())  # frames, whose tensors it must not hold
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        for frame in reversed(frames):
            if id(frame) not in handled:
                handled.add(id(frame))
                _leave(frame.f_locals)
        raise


class NodeByNode(Interpreter):
    """Runs a graph node by node."""

    def run(self, *args: Any, **options: Any) -> Any:
        """Run the graph; see ``torch.fx.Interpreter``."""
        with regions_left():
            return super().run(*args, **options)


def _leave(values: Mapping[str, Any]) -> None:
    """Leave the regions that are open in a frame with these values: generated code, or an interpreter's."""
    owner = values.get("self")
    entries: Iterable[tuple[Node, Any]] = ()
    if isinstance(owner, GraphModule):
        entries = [(node, values.get(node.name)) for node in owner.graph.nodes]
    elif isinstance(owner, Interpreter):
        entries = [entry for entry in owner.env.items() if owner.env.keys().isdisjoint(entry[0].users)]
    for node, entry in reversed([*entries]):
        if node.target in REGIONS and entry is not None:  # generated code has ``None`` once a region is left
            REGIONS[node.target](entry)
            if isinstance(owner, Interpreter):
                del owner.env[node]
