"""Note which tensors' types code reads while a model is recorded."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.fx import Node

from fractrain_fx.capture.inputs.kinds import Kind, kind_of
from fractrain_fx.capture.recording.writer import Writer

__all__ = ["TYPE_READS", "Types"]

TYPE_READS = frozenset({"type", "element_size", "result_type", "promote_types", "can_cast"})
"""Functions and methods whose results follow from the types of their arguments."""


class Types:
    """The types that code read.

    Args:
        writer: the graph and its tensors.

    Attributes:
        floating: whether code read the floating type of a tensor.
    """

    def __init__(self, writer: Writer) -> None:
        self.floating = False
        self._writer = writer
        self._read: list[tuple[Node, Kind]] = []

    def __len__(self) -> int:
        return len(self._read)

    def cut(self, length: int) -> None:
        """Forget what was read since there were ``length`` nodes."""
        del self._read[length:]

    def read(self, tensors: Iterable[Tensor]) -> None:
        """Note that code read the types of these tensors."""
        for x in tensors:
            dtype, node = x.dtype, self._writer.known(x)
            self.floating |= dtype.is_floating_point
            if node is not None:
                self._read.append((node, kind_of(dtype)))

    def inputs(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        """The numbers of the inputs whose exact type the recorded code may have read, itself or of what it computed.

        A type can only come from inputs of the same kind: embeddings of 32-bit tokens have the type of the weight.
        """
        reached = {kind: _sources(node for node, each in self._read if each is kind) for _, kind in self._read}
        found = ((i, self._writer.known(x), kind_of(x.dtype)) for i, x in enumerate(tensors))
        return frozenset(i for i, node, kind in found if node in reached.get(kind, ()))


def _sources(nodes: Iterable[Node]) -> set[Node]:
    """Nodes that are still in the graph, with all nodes that they are computed from."""
    found: set[Node] = set()
    waiting = [node for node in nodes if not node._erased]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found
