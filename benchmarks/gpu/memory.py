"""The memory of a training step against float32: what autograd keeps, and the peak of all allocations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks.gpu.setting import Setting
from benchmarks.gpu.steps import measured

__all__ = ["HOW", "items"]

HOW = """
`saved` is what autograd keeps from forward to backward (each storage once and whole, without parameters); `peak` is the
most that a step allocates at a time, without what was allocated before. Ratios are to eager float32.
`+checkpointed` is `gradient_checkpointing_enable()`.
""".strip()

_METHODS = (
    *("float", "float+bf16", "static+kernels", "pfq+kernels", "dfq+kernels"),
    *("dfq+kernels+bf16", "dfq+kernels+auto", "pfq+kernels+checkpointed", "dfq+kernels+checkpointed"),
)
_COLUMNS = ("model", "method", "saved, MB", "saved, ratio", "peak, MB", "peak, ratio", "note")


def items(setting: Setting) -> Mapping[str, Any]:
    """One item for each model."""
    models = ("gpt2-tiny",) if setting.small else ("gpt2", "transformer-base", "resnet50")
    methods = ("float", "static+kernels", "pfq+checkpointed") if setting.small else _METHODS
    return {name: partial(_rows, name, methods, setting) for name in models}


def _rows(name: str, methods: tuple[str, ...], setting: Setting) -> Iterator[dict[str, Any]]:
    quick = Setting(setting.device, setting.small, rounds=1)
    for row in measured(name, methods, quick):
        yield {column: row[column] for column in _COLUMNS}
