"""Count contractions inside calls that a graph shows as one node: modules, functions, operators of other libraries."""

from __future__ import annotations

import contextlib
import dis
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from torch._library.custom_ops import OPDEFS
from torch.fx import Node

from fractrain_fx.capture.recording.writer import nodes_after
from fractrain_fx.capture.targets import CONTRACTIONS, call_name, is_product
from fractrain_fx.capture.trees import tensors_in

__all__ = [
    "HIDDEN",
    "MODULE",
    "Hidden",
    "HiddenCalls",
    "contractions_in_backward",
    "contractions_in_operator",
    "products_after",
]

HIDDEN = "hidden"
"""Key of ``node.meta``: the contractions inside the node's call, as :class:`Hidden`."""

MODULE = "a module kept whole"
_BACKWARD = " in backward"
_UNSHOWN = "calls that torch does not show"
_TORCH = ("", "aten", "prim", "prims")
"""Namespaces of torch's own operators, which are known by their names."""


@dataclass(frozen=True)
class Hidden:
    """The contractions of each kind inside a call; ``call`` is that call in words.

    ``name`` is its name in a table, empty for a module, which has its path.
    """

    call: str
    name: str
    contractions: Mapping[str, int]

    def __str__(self) -> str:
        """The call and its contractions in words, such as ``a module kept whole: 2 linear, 1 matmul``."""
        if _UNSHOWN in self.contractions:
            return f"{self.call}: {_UNSHOWN}"
        forward = {name: count for name, count in self.contractions.items() if not name.endswith(_BACKWARD)}
        # Contractions in forward imply their own backward, so only a call without them shows its backward.
        shown = forward or self.contractions
        return f"{self.call}: " + ", ".join(f"{count} {name.strip('_')}" for name, count in sorted(shown.items()))


class HiddenCalls:
    """Counts the contractions that run inside a call, and notes them on the node that the call becomes."""

    def __init__(self) -> None:
        self._call = self._name = ""
        self._found: Counter[str] = Counter()
        self._counting = self._trained_only = False

    def expect(self, call: str, name: str, known: Mapping[str, int]) -> None:
        """Take the contractions that a call is known to have."""
        self._call, self._name, self._found = call, name, Counter(known)

    @contextlib.contextmanager
    def counted(
        self, call: str, name: str = "", known: Mapping[str, int] | None = None, *, trained_only: bool = False
    ) -> Iterator[None]:
        """Count the contractions of one call; ``call`` is that call in words, ``name`` its name in a table.

        ``known`` are contractions that the call has in any case. ``trained_only`` counts only contractions through
        whose result a gradient flows.
        """
        self.expect(call, name, known or {})
        self._counting, self._trained_only = True, trained_only
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
        counts = {name: count for name, count in self._found.items() if count}
        if counts:
            node.meta[HIDDEN] = Hidden(self._call, self._name, counts)
        self.forget()

    def forget(self) -> None:
        """Drop the counts, because the call leaves no node."""
        self._found = Counter()


def products_after(last: Node, counts: Callable[[Node], bool]) -> Counter[str]:
    """The contractions among the nodes after ``last`` that count."""
    products: Counter[str] = Counter()
    for node in nodes_after(last):
        name = str(node.target) if node.op == "call_method" else call_name(node.target)
        products[name] += is_product(name) and counts(node)
    return products


def contractions_in_backward(function: Any) -> Counter[str]:
    """Contractions named in the code of an autograd Function's ``backward``, which a recording does not run."""
    return Counter({f"{name}{_BACKWARD}" for name in _named(inspect.unwrap(function.backward), set())})


def contractions_in_operator(name: str, values: Any) -> Counter[str]:
    """Contractions in an operator of another library, with ``values`` as its arguments.

    The code of an operator in Python names them. One in C++ is taken to have some if it is given two matrices.
    """
    if name.partition("::")[0] in _TORCH or is_product(name.partition("::")[2]):
        return Counter()
    if name in OPDEFS:
        return Counter(_named(OPDEFS[name]._init_fn, set()))
    matrices = [x for x in tensors_in(values) if x.is_floating_point() and x.ndim >= 2]
    return Counter({_UNSHOWN: 1} if len(matrices) >= 2 else {})


def _named(function: Any, visited: set[int]) -> Iterator[str]:
    """Contractions named in a function's code, and in that of the functions, or kernels of Triton, that it calls."""
    function = inspect.unwrap(getattr(function, "fn", function))
    if id(function) in visited or not isinstance(function, FunctionType) or function.__module__.startswith("torch."):
        return
    visited.add(id(function))
    called: set[str] = set()
    yield from _named_in(function.__code__, called)
    for name in called & function.__globals__.keys():
        yield from _named(function.__globals__[name], visited)


def _named_in(code: CodeType, called: set[str]) -> Iterator[str]:
    called.update(code.co_names)
    yield from (name for name in code.co_names if name in CONTRACTIONS)
    if any(op.opname == "BINARY_OP" and op.argrepr == "@" for op in dis.get_instructions(code)):
        yield "matmul"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _named_in(constant, called)
