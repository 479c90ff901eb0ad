"""One module of the corpus beside its rewrite: training, evaluation, and one step with low precision."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.coverage.checks import cause
from benchmarks.coverage.corpus.modules import Case, is_stand_in
from benchmarks.coverage.corpus.outputs import differs, leaves, objective, same
from benchmarks.coverage.corpus.peers import compiled, exported
from benchmarks.coverage.resized import DIFFERENT, ERROR, REFUSED
from fractrain_fx import Engine, FracConfig, Pin, Precision, fractrainify
from fractrain_fx.errors import FracTrainError

__all__ = ["NOT_DONE", "NO_WEIGHTS", "PASSED", "UNUSABLE", "Between", "LateError", "Row", "Watch", "examine"]

Row = dict[str, Any]
Watch = Callable[[], AbstractContextManager[None]]
"""Makes the context that ends one check after its time, with a :class:`LateError`."""

PASSED, UNUSABLE, NOT_DONE, NO_WEIGHTS = "passed", "unusable", "not done", "no weights"
_BUILD, _INPUTS, _CALL = 0, 1, 3  # seeds


class LateError(BaseException):
    """A check took too long. Not an ``Exception``, which code of others may catch."""


class _VerdictError(Exception):
    """The verdict on a module, with the cause."""

    def __init__(self, verdict: str, why: str) -> None:
        super().__init__(why)
        self.verdict = verdict


class Between(nn.Module):
    """A module between two layers, so that there is something to quantize and nothing of the module is first or last.

    Both layers work beside the module, on a copy of the first tensor that it is given.

    Args:
        inner: the module.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(1, 2)
        self.inner = inner
        self.last = nn.Linear(2, 2)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = (value for _, value in leaves((args, kwargs)) if isinstance(value, Tensor) and value.dim())
        x = next(given)
        x = x.abs() if x.is_complex() else x.float().clone()
        x = self.first(x.reshape(x.shape[0], -1)[:, :1])
        return self.inner(*args, **kwargs), self.last(x)


def examine(case: Case, watch: Watch, heaviest: float = math.inf) -> Row:
    """All checks of one module.

    Args:
        case: the module.
        watch: the limit of each check.
        heaviest: processor seconds for building and calling the module four times; one that takes longer is not usable.

    Returns:
        ``verdict``: :data:`PASSED`, ``refused``, ``silently different``, ``raw error``, or :data:`UNUSABLE` if the
        module itself does not run; then ``pfq``, ``export`` and ``fullgraph``, each with a cause.
    """
    row: Row = {}
    with _judged(row, "verdict"), watch():
        _require_usable(case, heaviest)
    if row["verdict"] != PASSED:
        return row
    with _judged(row, "verdict"), watch():
        _compare(case)
    with _judged(row, "pfq"), watch():
        if row["verdict"] == PASSED:
            _take_a_step(case)
        else:
            raise _VerdictError("not reached", "")
    for name, peer in (("export", exported), ("fullgraph", compiled)):
        with _judged(row, name), watch():
            _compare_peer(case, peer)
    return row


@contextmanager
def _judged(row: Row, name: str) -> Iterator[None]:
    """Note under ``name`` how the code inside ends, with the cause under ``name`` and ``_cause``."""
    try:
        yield
    except _VerdictError as failure:
        verdict, why = failure.verdict, str(failure)
    except LateError as late:
        verdict, why = NOT_DONE, str(late)
    except FracTrainError as error:
        verdict, why = REFUSED, cause(error)
    except Exception as error:  # code of others raises anything
        verdict, why = ERROR, cause(error)
    else:
        verdict, why = PASSED, ""
    row[name] = verdict
    row.pop(f"{name}_cause", None)
    if why:
        row[f"{name}_cause"] = why


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _built(case: Case) -> Between:
    _seed(_BUILD)
    return Between(case.build())


def _inputs(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    _seed(_INPUTS)
    return case.inputs()


def _called(model: nn.Module, case: Case) -> Any:
    args, kwargs = _inputs(case)
    _seed(_CALL)
    return model(*args, **kwargs)


def _require_usable(case: Case, heaviest: float) -> None:
    """The module runs, takes and gives tensors, and gives the same ones when it is built again."""
    start = time.process_time()
    try:
        if not any(isinstance(value, Tensor) and value.dim() for _, value in leaves(_inputs(case))):
            raise _VerdictError(UNUSABLE, "it takes no tensor")
        for training in (True, False):
            outputs = []
            for _ in range(2):
                outputs.append(_called(_built(case).train(training), case))
                if time.process_time() - start > heaviest:
                    raise _VerdictError(UNUSABLE, f"too large: over {heaviest:g} s for four calls")
            values = [value for _, value in leaves(outputs[0][0])]
            if not any(isinstance(value, Tensor) for value in values):
                raise _VerdictError(UNUSABLE, "it returns no tensor")
            if any(map(is_stand_in, values)):
                raise _VerdictError(UNUSABLE, "it needs a package that is not installed")
            if differs(*outputs):
                raise _VerdictError(UNUSABLE, "it computes something else each time")
    except _VerdictError:
        raise
    except Exception as error:  # code of others raises anything
        raise _VerdictError(UNUSABLE, cause(error)[:200]) from error


def _compare(case: Case) -> None:
    """The float rewrite equals the module in a training step and then in evaluation."""
    model = _built(case)
    args, kwargs = _inputs(case)
    config = FracConfig(method="float")
    rewritten = fractrainify(_built(case), config=config, example_inputs=args, example_kwargs=kwargs)
    for training in (True, False):
        mode = "training" if training else "evaluation"
        theirs = _called(model.train(training), case)
        mine = _called(rewritten.train(training), case)
        _require(differs(theirs, mine), mode)
        if training and _backward(theirs, ours=False):
            _backward(mine, ours=True)
            gradients = [{n: p.grad for n, p in module.named_parameters()} for module in (model, rewritten)]
            _require(_other_tensor(*gradients), "gradient")
        _require(_other_tensor(dict(model.named_buffers()), dict(rewritten.named_buffers())), f"buffer after {mode}")


def _backward(output: Any, ours: bool) -> bool:
    """Whether a backward pass could be made; a module of the corpus itself may be unable to."""
    loss = objective(output)
    if loss is None:
        return False
    _seed(_CALL)
    try:
        loss.backward()
    except Exception:
        if ours:
            raise
        return False
    return True


def _other_tensor(theirs: Mapping[str, Tensor | None], mine: Mapping[str, Tensor | None]) -> str | None:
    """The first name of ``theirs`` under which ``mine`` has another tensor. No gradient is a gradient of zero."""
    for name, x in theirs.items():
        y = mine.get(name)
        if x is None or y is None:
            if any(tensor is not None and bool(tensor.to_dense().any()) for tensor in (x, y)):
                return name
        elif not same(x, y):
            return name
    return None


def _require(other: str | None, what: str) -> None:
    if other is not None:
        raise _VerdictError(DIFFERENT, f"{what}: {other}")


def _take_a_step(case: Case) -> None:
    """One training step in low precision."""
    model = _built(case)
    if not any(p.requires_grad and p.dim() > 1 for p in model.inner.parameters()):
        raise _VerdictError(NO_WEIGHTS, "")
    args, kwargs = _inputs(case)
    low = Precision(8, 8)
    config = FracConfig(method="pfq", pins=(Pin("first", low), Pin("last", low)))
    rewritten = fractrainify(model, config=config, example_inputs=args, example_kwargs=kwargs).train()
    engine = Engine(rewritten)
    loss = objective(_called(rewritten, case))
    if loss is not None:
        engine.loss(loss).backward()


def _compare_peer(case: Case, peer: Callable[..., Any]) -> None:
    """Another way to a graph gives the outputs of the module in training. It is given the module alone."""
    model, again = (_built(case).inner.train() for _ in range(2))
    theirs = _called(model, case)
    args, kwargs = _inputs(case)
    try:
        graph = peer(again, args, kwargs)
        mine = _called(graph, case)
    except Exception as error:
        raise _VerdictError(REFUSED, cause(error)[:300]) from error
    _require(differs(theirs, mine), "training")
