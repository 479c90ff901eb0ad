"""Consequences of values: sizes of results (``nonzero``), numbers of parts, and tests that only raise an error."""

from __future__ import annotations

import bisect
import dis
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import pairwise
from types import FrameType
from typing import Any

from torch import Tensor
from torch.fx import Node

from fractrain_fx.capture import targets
from fractrain_fx.capture.trees import ValueList, has_mask

__all__ = ["decided_dims", "deciding", "guards_an_error", "part_count", "passed_on", "tests_for_overflow"]

_ALL = frozenset(range(64))  # every dimension that a tensor can have
_ROWS = frozenset({0})
_FIRST = frozenset({"nonzero", "argwhere", "masked_select", "bincount"})
# Calls whose result has the form of their first operand, whatever rows the others have.
_KEEP_FORM = frozenset(
    {"index_add", "index_copy", "index_put", "index_fill", "index_reduce", "scatter", "scatter_add", "scatter_reduce"}
    | {"masked_fill", "masked_scatter", "copy"}
)
_TESTS = ("isinf", "isnan", "isfinite")
_COMBINES = ("any", "all", "or_", "and_", "invert", "logical_or", "logical_and", "logical_not", "getitem")


def decided_dims(name: str, args: tuple[Any, ...]) -> frozenset[int]:
    """Dimensions of a call's results whose length depends on values."""
    if name in _FIRST or (name == "where" and len(args) == 1):
        return _ROWS
    if name in ("__getitem__", "getitem") and has_mask(args[1]):
        return _ROWS if isinstance(args[1], Tensor) else _ALL
    if name == "repeat_interleave" and len(args) > 1 and isinstance(args[1], Tensor):
        return _ALL
    if name in targets.DATA_DEPENDENT or any(isinstance(arg, ValueList) for arg in args):
        return _ALL
    return frozenset()


def deciding(name: str, args: tuple[Any, ...]) -> Any:
    """The arguments of a call that decide the length of such dimensions."""
    if name in ("__getitem__", "getitem", "repeat_interleave") and len(args) > 1:
        return args[1]
    return args


def passed_on(name: str, result: Tensor, operands: Iterable[tuple[Tensor, Collection[int]]]) -> frozenset[int]:
    """Dimensions of a result whose length depends on data, because that of an operand does.

    Lengths are compared: a dimension is free of data if an operand has a dimension of that length that is free of data.
    A dimension whose length equals, even by chance, one that depends on data counts as dependent too. ``operands`` are
    the tensors that the call was given, each with its dimensions that depend on data.
    """
    operands = list(operands)
    if name.strip("_") in _KEEP_FORM:
        return frozenset(operands[0][1])
    decided = {x.shape[dim] for x, dims in operands for dim in dims if dim < x.ndim}
    free = {size for x, dims in operands for dim, size in enumerate(x.shape) if dim not in dims}
    return frozenset(d for d, size in enumerate(result.shape) if size in decided or (size not in free and size != 1))


_Counted = tuple[Tensor, int, Callable[..., int], tuple[Any, ...]]


def parts_of(size: int, part: int) -> int:
    """The number of parts of at most ``part`` rows each."""
    return max(-(-size // part), 1)


def chunks_of(size: int, wanted: int) -> int:
    """The number of equal parts, at most ``wanted``."""
    return max(-(-size // max(-(-size // wanted), 1)), 1) if size else wanted


def rows_of(size: int) -> int:
    """One part for each row."""
    return size


_SPLITS = frozenset({"split", "unsafe_split", "split_with_sizes"})
_CHUNKS = frozenset({"chunk", "unsafe_chunk"})
_UNBINDS = frozenset({"unbind", "__iter__"})
_KEYWORDS = ("split_size_or_sections", "split_size", "chunks")


def part_count(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Counted | None:
    """The number of parts as a function of a size; ``None`` for other calls, and if the caller gives all part sizes.

    Gives the tensor, the dimension that is cut, the function that counts, and its operands after the size of that
    dimension.
    """
    if not (args and isinstance(args[0], Tensor)):
        return None
    if name in _UNBINDS:
        return args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0), rows_of, ()
    if name not in _SPLITS and name not in _CHUNKS:
        return None
    size_or_count = args[1] if len(args) > 1 else next((kwargs[key] for key in _KEYWORDS if key in kwargs), None)
    if not isinstance(size_or_count, int):
        return None
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    return args[0], dim, chunks_of if name in _CHUNKS else parts_of, (size_or_count,)


def tests_for_overflow(node: Node) -> bool:
    """Whether a node only tells if values are infinite or NaN."""
    name = str(getattr(node.target, "__name__", node.target))
    if name in _TESTS:
        return True
    return name in _COMBINES and bool(node.all_input_nodes) and all(map(tests_for_overflow, node.all_input_nodes))


def guards_an_error(frame: FrameType, value: bool, called: bool = False, compared: bool = False) -> bool:
    """Whether the truth value that ``frame`` has just asked for decides only about raising an error.

    True for ``assert x``, ``if x: raise ...`` and ``if x: torch._assert(False, ...)``, because the branch that was not
    taken runs straight into the error, and for torch's own checks (``torch._check_tensor_all``, and those of the
    parameters of distributions). The next instruction takes the result of a call (``called``: ``x.item()``) or of a
    comparison of sizes (``compared``).
    """
    module = str(frame.f_globals.get("__name__"))
    if module == "torch.distributions.constraints" or (module == "torch" and frame.f_code.co_name.startswith("_check")):
        return value
    code = list(dis.get_instructions(frame.f_code))
    places = {instruction.offset: i for i, instruction in enumerate(code)}
    # While Python code runs that was called, the place is behind the call's own entries, which are not listed.
    at = bisect.bisect(list(places), frame.f_lasti) - 1
    if at < 0:
        return False
    passed = ("UNARY_NOT", "TO_BOOL", "CACHE", *(("CALL",) if called else ()), *(("COMPARE_OP",) if compared else ()))
    while code[at].opname in passed:
        value = value != (code[at].opname == "UNARY_NOT")
        at += 1
    jump = code[at].opname
    if "JUMP" not in jump or "_IF_" not in jump or "NONE" in jump:
        return False
    jumps = value == jump.endswith("TRUE")
    other = at + 1 if jumps else places[code[at].argval]
    for instruction, after in pairwise(code[other:]):
        if instruction.opname == "RAISE_VARARGS":
            return True
        if instruction.argval == "_assert" and after.opname == "LOAD_CONST" and after.argval is False:
            return True
        if "JUMP" in instruction.opname or "RETURN" in instruction.opname:
            return False
    return False
