"""The time of a training step against eager float32 (:mod:`benchmarks.step`)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console

from benchmarks.gpu.setting import Setting
from benchmarks.step.__main__ import measure
from benchmarks.step.methods import parse
from benchmarks.step.subjects import SUBJECTS

__all__ = ["HOW", "compiled_items", "items", "measured"]

_MODELS = ("transformer-base", "resnet38", "gpt2", "resnet50", "vit_small")
_TITLES = "; ".join(f"`{name}` is {SUBJECTS[name].title}" for name in _MODELS)

HOW = f"""
A step is forward, `engine.loss` and backward in training mode, without the optimizer. Ratios are to the eager float32
step of the same round: median (quartiles). `to float alike` is the ratio to float in the same modes (TF32, bfloat16
autocast, compiled). `+kernels` is `backend="cpu"`, which takes Triton kernels, as `auto` does where Triton is
installed; ours without it have `backend="plain"`. `+auto` is `skipping="left-out"`, `+torchao-...` is
`torchao=True`, `+compiled` is `torch.compile(model, fullgraph=True)`, and `+graphs` the same with
`mode="reduce-overhead"`, that is CUDA graphs. Several models were compiled at a time, beside the checks above, so a
compiled method's first step is longer than alone. The samples of a batch choose all options of DFQ equally often.
`waits` are waits of the host for the GPU in one step. {_TITLES}.
""".strip()

_EAGER = (
    *("float", "float+tf32", "float+bf16", "pfq+kernels", "pfq+kernels+bf16", "dfq+kernels", "dfq+kernels+auto"),
    "pfq",
)
# Apart from the others, because torchao may tune its kernels for minutes; both models are linear layers.
_TORCHAO = ("float", "float+bf16", "static+torchao-float8+bf16", "static+torchao-int8+bf16")
_LINEAR = ("transformer-base", "gpt2")
# Most models wait for the launches of their kernels, so CUDA graphs come first.
_GRAPHS = ("pfq+graphs", "dfq+graphs")
_COMPILED = ("pfq+compiled", "dfq+compiled")
_BF16 = ("pfq+bf16+compiled", "static+torchao-float8+bf16+compiled")
_COLUMNS = ("model", "method", "step, ms", "ratio", "to float alike", "waits", "first step, s", "note")


def items(setting: Setting) -> Mapping[str, Any]:
    """One item for the eager methods of a model, one for torchao's, and one for each compiled method."""
    if setting.small:
        return _eager(("gpt2-tiny",), ("float", "float+bf16", "pfq", "dfq+auto", "static"), setting) | _compiled(
            ("gpt2-tiny",), ("float+compiled",), setting
        )
    ours = _eager(_MODELS, _EAGER, setting) | _compiled(_MODELS, (*_GRAPHS, *_COMPILED), setting)
    torchao = {f"{name}, torchao": partial(_rows, name, _TORCHAO, setting) for name in _LINEAR}
    return ours | torchao | _compiled(_LINEAR, _BF16, setting)


def compiled_items(setting: Setting) -> list[str]:
    """The items whose steps are compiled first, all at a time, in order of worth."""
    return [name for name in items(setting) if name.endswith(("+compiled", "+graphs"))]


def _eager(models: Sequence[str], methods: Sequence[str], setting: Setting) -> dict[str, Any]:
    return {f"{name}, eager": partial(_rows, name, methods, setting) for name in models}


def _compiled(models: Sequence[str], methods: Sequence[str], setting: Setting) -> dict[str, Any]:
    return {
        f"{name}, {method}": partial(_rows, name, ["float", str(parse(method).alike), method], setting)
        for method in methods
        for name in models
    }


def _rows(name: str, methods: Sequence[str], setting: Setting) -> Iterator[dict[str, Any]]:
    for row in measured(name, methods, setting):
        yield {column: row[column] for column in _COLUMNS}


def measured(name: str, methods: Sequence[str], setting: Setting) -> Iterator[dict[str, Any]]:
    """A row for each method on a model; one that fails has a note instead of numbers."""
    batch = 2 if setting.small else None
    options = Namespace(device=setting.device, batch=batch, rounds=setting.rounds, clock="wall")
    chosen = [parse(method) for method in dict.fromkeys(methods)]
    quiet = Console(quiet=True)
    run = measure(name, chosen, options, "python -m benchmarks.gpu", quiet, Exception, prepared=setting.prepared)
    for row in run.rows:
        waiting = ", ".join(f"{count} {kind}" for kind, count in (row.waits or {}).items())
        yield {
            "model": f"{name}, batch {run.batch}",
            "method": row.method,
            "step, ms": row.ms,
            "ratio": row.ratio,
            "to float alike": row.alike,
            "saved, MB": row.saved and row.saved / 1e6,
            "saved, ratio": row.saved_ratio,
            "peak, MB": row.peak and row.peak / 1e6,
            "peak, ratio": row.peak_ratio,
            "waits": waiting,
            "first step, s": row.first,
            "note": row.note,
        }
