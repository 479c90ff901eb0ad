"""Count the kernels that a training step launches on a GPU, without a GPU.

``python -m benchmarks.launches --models transformer-base`` runs the step on the meta device, where tensors have shapes
and no values. An operator of torch that computes counts as one kernel; views, empty memory and reads of sizes count as
none. The package's Triton kernels are counted, not launched. A library may use more kernels than one for an
operator (a sum of a large tensor, cuDNN), so the numbers are for comparing methods. ``--compiled`` counts the calls in
the code that Inductor generates for the step.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.compiled_launches import compiled_launches
from benchmarks.step.methods import config_of, spread_choices
from benchmarks.step.subjects import SUBJECTS, Subject
from fractrain_fx import Engine, Precision, fractrainify
from fractrain_fx.kernels.triton import fit
from fractrain_fx.native.choice import MEANING

__all__ = ["METHODS", "launches", "launches_compiled"]

METHODS = ("float", "pfq", "dfq", "mxfp8", "mxfp4", "nvfp4", "fp8")
"""The methods that are counted; the rounding ones by Triton kernels."""

_KERNELS = {
    "kernels": ("rounded", "rounded_rows", "measured", "ends", "rows", "gains"),
    "blocks": ("blocks_rounded",),
    "gates": ("embedded", "embedded_errors", "chosen", "chosen_errors"),
}
# Operators that return memory, a view or a number of the host compute nothing.
_NO_KERNEL = (
    *("empty", "new_empty", "empty_like", "empty_strided", "lift_fresh", "set_"),
    *("_unsafe_view", "detach", "promote_types", "_local_scalar_dense"),
)


def launches(subject: Subject, method: str, *, kernels: bool = True) -> Counter[str]:
    """The kernels of a step of a model, by operator or by the name of a Triton kernel.

    It is the second step: the first one also computes what holds until the next stage.

    Args:
        subject: the model, which reads no values of its tensors.
        method: one of :data:`METHODS`.
        kernels: whether Triton kernels round.
    """
    x, y = subject.data(subject.batch["cpu"])
    with patch.dict(os.environ, {MEANING: "cuda"}):
        model, finish = _made(subject, method, x, "auto" if kernels else "plain", "meta")
    counts: Counter[str] = Counter()
    for _ in range(2):
        model.zero_grad()
        counts.clear()
        with _triton_counted(counts), _Counting(counts):
            finish(subject.loss(model(x.to("meta")), y.to("meta"))).backward()
    return counts


def launches_compiled(subject: Subject, method: str) -> Counter[str]:
    """The kernels of a compiled step of a model, by kind; all but the engine's part of the loss is compiled."""
    x, y = subject.data(subject.batch["cpu"])
    model, finish = _made(subject, method, x, "plain", "cpu")
    return compiled_launches(model, lambda compiled: finish(subject.loss(compiled(x), y)))


def _made(
    subject: Subject, method: str, x: Tensor, backend: str, device: str
) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """A model under a method in training mode, and what makes the loss of a step from the task's."""
    torch.manual_seed(0)
    model: nn.Module = subject.build()
    if method == "float":
        return model.to(device).train(), _same
    config = config_of(method).replace(**{"run.backend": backend, "run.compared_calls": 0})
    rewritten = fractrainify(model, config=config, example_inputs=(x[:2],)).to(device).train()
    spread_choices(rewritten, len(x))
    finish = Engine(rewritten).loss
    if method == "pfq":
        rewritten.set_precision(Precision(4, 8))  # the middle stage
    return rewritten, finish


def _same(loss: Tensor) -> Tensor:
    return loss


@contextmanager
def _triton_counted(counts: Counter[str]) -> Iterator[None]:
    """Let tensors without values go to the Triton kernels, and count these instead of launching them."""

    def taken(x: Tensor, *ranges: Tensor) -> bool:
        return x.is_meta and x.is_floating_point() and x.numel() > 0

    asked = fit.has_triton
    asking = [module for module in list(sys.modules.values()) if getattr(module, "has_triton", None) is asked]
    places = {f"fractrain_fx.kernels.triton.{name}": names for name, names in _KERNELS.items()}
    before = {place: sys.modules.get(place) for place in places}
    try:
        for module in asking:
            module.has_triton = taken  # type: ignore[attr-defined]
        for place, names in places.items():
            stand_in = ModuleType(place)
            for name in names:
                setattr(stand_in, name, _Launched(name, counts))
            sys.modules[place] = stand_in
        yield
    finally:
        for module in asking:
            module.has_triton = asked  # type: ignore[attr-defined]
        for place, kept in before.items():
            del sys.modules[place]
            if kept is not None:
                sys.modules[place] = kept


class _Launched:
    """Stands for a Triton kernel: ``kernel[grid](...)`` counts a launch."""

    def __init__(self, name: str, counts: Counter[str]) -> None:
        self._name, self._counts = name, counts

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self

    def __call__(self, *args: Any, **options: Any) -> None:
        self._counts[f"triton {self._name}"] += 1


class _Counting(TorchDispatchMode):
    """Counts the operators that compute."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        # Seeds of noise are tensors of the host.
        there = any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs, out)))
        if there and not func.is_view and name not in _NO_KERNEL:
            self._counts[name] += 1
        return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table of launches."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launches", description="count launches without a GPU")
    parser.add_argument("--models", nargs="+", choices=tuple(SUBJECTS), default=["transformer-base", "resnet38"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--plain", action="store_true", help="round by operators of torch, without Triton kernels")
    how.add_argument("--compiled", action="store_true", help="count a compiled step, beside float's eager step")
    options = parser.parse_args(arguments)
    table = Table("model", "method", "launches", "of float", "of them Triton")
    for name in options.models:
        base = launches(SUBJECTS[name], "float").total()
        for method in options.methods:
            if options.compiled:
                counts = launches_compiled(SUBJECTS[name], method)
            else:
                counts = launches(SUBJECTS[name], method, kernels=not options.plain)
            ours = sum(count for kernel, count in counts.items() if kernel.startswith("triton"))
            table.add_row(name, method, f"{counts.total():,}", f"{counts.total() / base:.2f}", f"{ours:,}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
