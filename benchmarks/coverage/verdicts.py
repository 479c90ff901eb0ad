"""One word for what became of a model, and one group for the cause of a model that could not be built."""

from __future__ import annotations

import re

from benchmarks.coverage.resized import DIFFERENT, ERROR, REFUSED
from benchmarks.coverage.trial import Row, passed
from fractrain_fx import errors

__all__ = ["FAILED", "NOT_BUILT", "PASSED", "group", "verdict"]

PASSED, NOT_BUILT, FAILED = "passed", "not built", "failed"
_REWRITING = ("capture", "float_rewrite", "rewrite")


def verdict(row: Row) -> str:
    """``passed``, ``not built``, ``refused``, ``silently different``, ``raw error`` or ``failed``.

    A model that computes something else silently in any check is ``silently different``, whichever check failed first.
    Rows from before the sweep wrote verdicts are judged by the class of their error.
    """
    if passed(row):
        return PASSED
    if row.get("failed_at") == "build":
        return NOT_BUILT
    if DIFFERENT in (row.get("verdict"), *row.get("sizes", {}).values()):
        return DIFFERENT
    if "verdict" in row:
        return str(row["verdict"])
    toolkit = row.get("cause", "").partition(":")[0] in errors.__all__
    if toolkit and row.get("failed_at") in _REWRITING:
        return REFUSED
    return ERROR if toolkit or re.match(r"\w+(Error|Exception): ", row.get("cause", "")) else FAILED


_TOO_LARGE = "too large for the sweep, even in its smallest configuration"
_GROUPS = (
    (r"example inputs for .* cannot be guessed", "example inputs cannot be guessed from the configuration"),
    (r"allocate memory|not done after|exit code|OutOfMemory|bad_alloc", "over the sweep's memory or time limit"),
    (r"ImportError|ModuleNotFoundError|is not installed", "needs a package that is not installed"),
    (r"its loss is", "its loss is not finite, or has no gradient"),
    (r"offline|LocalEntryNotFound|couldn't connect|huggingface\.co", "needs a download"),
)
_LARGE = re.compile(r"[\d,]+ parameters")
_RAISED = re.compile(r"\b(?!NotBuiltError)([A-Z]\w*(?:Error|Exception))\b")


def group(cause: str) -> str:
    """The group of reasons for which a model could not be built.

    A builder tries several sizes and names one reason for each. The size that was too large says nothing about the
    smaller ones, so that reason counts only if it is the only one.
    """
    for pattern, words in _GROUPS:
        if re.search(pattern, cause):
            return words
    raised = _RAISED.search(cause)
    if raised:
        return f"its library raises {raised[1]} for the small configuration"
    return _TOO_LARGE if _LARGE.search(cause) else "another reason"
