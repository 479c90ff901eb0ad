"""A linear layer on int8 and on float8 against float32, TF32 and bfloat16 (:mod:`benchmarks.linears`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.coverage.checks import cause
from benchmarks.gpu.setting import Setting
from benchmarks.linears import SIMULATED, rewritten, step
from benchmarks.records import quartiles, ratios
from benchmarks.step.measure import interleaved
from benchmarks.step.methods import tf32
from fractrain_fx import RunConfig

__all__ = ["HOW", "items"]

HOW = """
One linear layer of equal width in and out, forward and backward with all three products and all rounding. Ratios are to
bfloat16 autocast in the same round: median (quartiles). `torchao` is torchao's
training on int8 or float8, compiled by `torch.compile`, under bfloat16 autocast.
""".strip()

_Call = Callable[[], None]
_BASE = "bf16"
_TORCHAO = {"torchao-float8": "fp8", "torchao-int8": "int8"}
"""The recipe of each form."""


def items(setting: Setting) -> Mapping[str, Any]:
    """Two items for each width; torchao's is apart, because it may tune its kernels for minutes."""
    widths, tokens = ((32,), 64) if setting.small else ((1024, 4096, 2048, 8192, 512), 8192)
    own = {f"width {width}": partial(_rows, width, tokens, False, setting) for width in widths}
    return own | {f"width {width}, torchao": partial(_rows, width, tokens, True, setting) for width in widths}


def _rows(width: int, tokens: int, torchao: bool, setting: Setting) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    layer = nn.Linear(width, width).to(setting.device)
    x, g = torch.randn(2, tokens, width, device=setting.device)
    made: dict[str, Callable[[], _Call]] = {_BASE: lambda: step(layer, x, g.bfloat16(), bf16=True)}
    if torchao:
        made |= {form: partial(_torchao, layer, x, g.bfloat16(), recipe) for form, recipe in _TORCHAO.items()}
    else:
        made |= {
            "float32": lambda: step(layer, x, g),
            "tf32": lambda: _in_tf32(step(layer, x, g)),
            "simulated 8/8": lambda: step(rewritten(layer, x, "8/8", SIMULATED), x, g),
        }
    calls: dict[str, _Call] = {}
    notes: dict[str, str] = {}
    for name, make in made.items():
        try:
            call = make()
            for _ in range(3):
                call()
            calls[name] = call
        except Exception as error:  # a form that fails on this GPU is a finding, and the others go on
            notes[name] = cause(error)[:300]
    times = interleaved(calls, setting.rounds, setting.device)
    for name in made:
        yield {
            "width": width,
            "tokens": tokens,
            "form": name,
            "step, ms": quartiles([1000 * duration for duration in times[name]]) if name in times else None,
            "to bf16": ratios(times, name, _BASE) if name in times and _BASE in times else None,
            "note": notes.get(name, ""),
        }


def _in_tf32(call: _Call) -> _Call:
    def run() -> None:
        with tf32(True):
            call()

    return run


def _torchao(layer: nn.Module, x: torch.Tensor, g: torch.Tensor, recipe: str) -> _Call:
    model = rewritten(layer, x, "8/8", RunConfig(backend="cpu", torchao=True), recipe)
    compiled: Any = torch.compile(model, fullgraph=True)
    return step(compiled, x, g, bf16=True)
