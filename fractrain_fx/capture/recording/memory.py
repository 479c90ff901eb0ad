"""Note on each node which operands its call changed, and in the memory of which operands its result lies."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from fractrain_fx.capture.trees import is_strided, tensors_in

__all__ = ["ARRAYS", "KEPT", "Memory", "memory_in", "note_memory", "put_first"]

_MEMORY = "memory"

ARRAYS = (np.ndarray, array, bytearray)
"""Types whose memory a tensor may share."""

KEPT = "kept_arrays"
"""Key of ``node.meta``: the arrays that the function of a node keeps, each with a copy from before later calls."""

Place = int | str
"""A positional argument, or a keyword. Passes put other nodes there, so places outlive the nodes."""


@dataclass(frozen=True)
class Memory:
    """The places of operands that a call changed when it was recorded, and of those in whose memory its result lay."""

    writes: frozenset[Place] = frozenset()
    shares: frozenset[Place] = frozenset()

    @classmethod
    def of(cls, args: Iterable[Any], kwargs: Mapping[str, Any], result: Any, changed: Collection[int]) -> Memory:
        """The record of a call that has run; ``changed``: identities of the tensors that it changed."""
        arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        with torch._C.DisableTorchFunction():  # this is not a call of the model
            storages = _storages(result)
            shares = frozenset(place for place, value in arguments.items() if not storages.isdisjoint(_storages(value)))
        writes = (place for place, value in arguments.items() if any(id(x) in changed for x in tensors_in(value)))
        return cls(frozenset(writes), shares)

    def written(self, node: Node) -> list[Node]:
        """The operands of the node that are now at the places that were changed."""
        return _operands(node, self.writes)

    def shared(self, node: Node) -> list[Node]:
        """The operands of the node that are now at the places whose memory was shared."""
        return _operands(node, self.shares)


def memory_in(node: Node) -> Memory:
    """The record of a node; an empty one for nodes that no recorded call made."""
    record = node.meta.get(_MEMORY, Memory())
    assert isinstance(record, Memory)
    return record


def note_memory(node: Node, memory: Memory) -> None:
    """Add to the record of a node: what one of several runs showed holds for the node."""
    before = memory_in(node)
    node.meta[_MEMORY] = Memory(before.writes | memory.writes, before.shares | memory.shares)


def put_first(node: Node, value: Node) -> None:
    """Give a node one more operand, in front of the others."""
    memory = memory_in(node)
    node.meta[_MEMORY] = Memory(*(frozenset(map(_behind, places)) for places in (memory.writes, memory.shares)))
    node.args = (value, *node.args)


def _behind(place: Place) -> Place:
    return place if isinstance(place, str) else place + 1


def _storages(value: Any) -> set[Any]:
    """The storages of the tensors in a value; all tensors without a readable storage count as one."""
    return {_storage(x) for x in tensors_in(value)}


def _storage(x: Tensor) -> Any:
    try:
        return x.untyped_storage()._cdata if is_strided(x) else None
    except (NotImplementedError, RuntimeError):
        return None


def _operands(node: Node, places: Iterable[Place]) -> list[Node]:
    arguments: dict[Any, Any] = {**dict(enumerate(node.args)), **node.kwargs}
    operands: list[Node] = []
    map_arg([arguments.get(place) for place in sorted(places, key=str)], operands.append)
    return operands
