"""A training step in which a share of the samples skips every block it can (:mod:`benchmarks.skipping`)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks.gpu.setting import Setting
from benchmarks.skipping import HOW as _FORMS
from benchmarks.skipping import measure

__all__ = ["HOW", "items"]

HOW = _FORMS.strip()
_SHARES = (0.5, 0.0, 0.25, 0.75)


def items(setting: Setting) -> Mapping[str, Any]:
    """One item for each model and share."""
    models, shares = (("resnet10t",), (0.5,)) if setting.small else (("transformer-base", "resnet38"), _SHARES)
    return {f"{name}, {share:.0%}": partial(_rows, name, share, setting) for name in models for share in shares}


def _rows(name: str, share: float, setting: Setting) -> Iterator[dict[str, Any]]:
    options = Namespace(
        device=setting.device,
        batch=4 if setting.small else None,
        method="dfq",
        backend="cpu",
        rounds=setting.rounds,
        clock="wall",
        shares=[share],
    )
    run = measure(name, options, "python -m benchmarks.gpu")
    for row in run.rows:
        yield {
            "model": f"{name}, batch {run.batch}",
            "skipped": f"{row.share:.0%}",
            "form": row.form,
            "step, ms": row.ms,
            "to masked": row.to_masked,
            "to float": row.to_float,
            "saved memory to float's": row.saved_ratio,
        }
