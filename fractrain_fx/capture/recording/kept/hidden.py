"""Count contractions inside calls that a graph shows as one node: autograd Functions, and modules kept whole."""

from __future__ import annotations

import contextlib
import dis
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

from torch.fx import Node

from fractrain_fx.capture.targets import CONTRACTIONS, call_name, is_product
from fractrain_fx.capture.trees import tensors_in

__all__ = ["HIDDEN", "HiddenCalls", "contractions_in_backward", "hidden_words"]

HIDDEN = "hidden"
"""Key of ``node.meta``: the number of contractions inside the node's call, by name."""

_BACKWARD = " in backward"


class HiddenCalls:
    """Counts the contractions that run inside a call, and notes them on the node that the call becomes."""

    def __init__(self) -> None:
        self._found: Counter[str] = Counter()
        self._counting = self._trained_only = False

    @contextlib.contextmanager
    def counted(self, known: Mapping[str, int], *, trained_only: bool) -> Iterator[None]:
        """Count the contractions of one call.

        Args:
            known: contractions that the call has in any case.
            trained_only: count only contractions through whose result a gradient flows.
        """
        self._found, self._counting, self._trained_only = Counter(known), True, trained_only
        try:
            yield
        finally:
            self._counting = False

    def seen(self, func: Any, result: Any) -> Any:
        """Note a torch call inside another call, and return its result."""
        name = call_name(func) if self._counting else ""
        if is_product(name):
            self._found[name] += 1 if not self._trained_only or any(x.requires_grad for x in tensors_in(result)) else 0
        return result

    def note_on(self, node: Node) -> None:
        """Write the counts on the node of the counted call."""
        found = {name: count for name, count in self._found.items() if count}
        if found:
            node.meta[HIDDEN] = found
        self.forget()

    def forget(self) -> None:
        """Drop the counts, because the call leaves no node."""
        self._found = Counter()


def contractions_in_backward(function: Any) -> Counter[str]:
    """Contractions named in the code of an autograd Function's ``backward``, which a recording does not run."""
    backward = inspect.unwrap(function.backward)
    code = getattr(backward, "__code__", None)
    return Counter({f"{name}{_BACKWARD}" for name in _named(code)}) if code is not None else Counter()


def hidden_words(contractions: Mapping[str, int]) -> str:
    """The contractions inside a call in words, such as ``2 linear, 1 matmul``."""
    forward = {name: count for name, count in contractions.items() if not name.endswith(_BACKWARD)}
    # Contractions in forward imply their own backward, so only a call without them shows its backward.
    shown = forward or contractions
    return ", ".join(f"{count} {name.strip('_')}" for name, count in sorted(shown.items()))


def _named(code: CodeType) -> Iterator[str]:
    for name in code.co_names:
        if name in CONTRACTIONS:
            yield name
    if any(each.opname == "BINARY_OP" and each.argrepr == "@" for each in dis.get_instructions(code)):
        yield "matmul"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _named(constant)
