"""Decide whether a value that Python reads changes the computation, or only whether an error is raised."""

from __future__ import annotations

import bisect
import dis
from itertools import pairwise
from types import FrameType

from torch.fx import Node

__all__ = ["guards_an_error", "tests_for_overflow"]

_TESTS = ("isinf", "isnan", "isfinite")
_COMBINES = ("any", "all", "or_", "and_", "invert", "logical_or", "logical_and", "logical_not", "getitem")


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
