"""The model card: ``README.md`` of a saved model, with the front matter that the Hub reads."""

from __future__ import annotations

import json
from collections.abc import Mapping

from torch import nn

from fractrain_fx.engine.course import SteeredRun
from fractrain_fx.engine.rows import pure_rows
from fractrain_fx.engine.steered import show_level
from fractrain_fx.model.state import ModelState

__all__ = ["card_text"]

_METHODS = {
    "float": "nothing is rounded",
    "static": "one precision",
    "pfq": "the precision rises in stages (PFQ)",
    "dfq": "gates choose each block's precision for each input (DFQ)",
    "fractrain": "gates choose each block's precision for each input, at a cost that rises in stages (FracTrain)",
    "slu": "gates skip blocks (SLU)",
}


def card_text(state: ModelState, run: SteeredRun | None, name: str, *, macs: int, loads: bool) -> str:
    """The text of a card; ``macs`` are the forward MACs of a sample.

    ``run`` is the training, if an engine steered it; ``name`` is the folder, or the repository on the Hub. ``loads``:
    transformers loads the folder as the float model.
    """
    results = state.results
    parts = [_front_matter(state.original, results, name), _training(state, run, macs)]
    if results:
        parts.append(_table("Results", ("measure", "value"), [(key, f"{value:g}") for key, value in results.items()]))
    return "\n".join([*parts, _loading(type(state.original).__name__, name, loads)])


def _front_matter(original: nn.Module, results: Mapping[str, float], name: str) -> str:
    base = getattr(getattr(original, "config", None), "_name_or_path", "")
    lines = ["library_name: fractrain_fx", "tags: [fractrain, quantization, low-precision-training]"]
    if base:
        lines.append(f"base_model: {json.dumps(base)}")
    if results:
        metrics = [f"      - {{type: {json.dumps(key)}, value: {value!r}}}" for key, value in results.items()]
        task = ["    - task: {type: other}", "      dataset: {name: unknown, type: unknown}", "      metrics:"]
        lines += ["model-index:", f"  - name: {json.dumps(name)}", "    results:", *task, *metrics]
    return "\n".join(["---", *lines, "---", f"\n# {type(original).__name__}, trained in fractional precision\n"])


def _training(state: ModelState, run: SteeredRun | None, macs: int) -> str:
    config = state.config
    pins = ", ".join(f"`{pin}`" for pin in config.pins)
    lines = [
        f"- Method: `{config.method}`: {_METHODS[config.method]}, by `fractrain_fx`, after "
        "[the paper](https://arxiv.org/abs/2012.13113).",
        f"- Number format: `{config.format}`." + (f" Pins: {pins}." if pins else ""),
        f"- Forward MACs of a sample: {macs:,}.",
    ]
    if run is None or not run.ledger.rows:
        return "\n".join([*lines, "- No engine trained this model yet.\n"])
    ledger = run.ledger
    lines += [
        f"- Training: {len(ledger.rows)} epochs, {ledger.samples:,} samples.",
        f"- Cost: {100 * ledger.mean_cp:.2f} % of the bit operations of 32-bit training over the layers whose bits the "
        f"method chooses, {100 * ledger.mean_cp_total:.2f} % over all layers.",
        f"- Cost in MACs at 32 bits: {ledger.total_macs:.3e}.\n",
    ]
    parts = pure_rows(ledger.rows)
    stages: list[tuple[str, ...]] = [
        (str(row.stage + 1), show_level(row.level), str(row.epoch), "" if row.loss is None else f"{row.loss:.4f}")
        for row, after in zip(parts, [*parts[1:], None], strict=True)
        if after is None or after.stage != row.stage
    ]
    heads = ("stage", "level", "until epoch", "training loss at its end")
    return "\n".join(lines) + "\n" + _table("Stages", heads, stages)


def _table(title: str, heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join([f"## {title}\n", *(f"| {' | '.join(cells)} |" for cells in lines), ""])


def _loading(architecture: str, name: str, loads: bool) -> str:
    text = f"""## Load

```python
from fractrain_fx import FracModel

model = FracModel.from_pretrained({name!r}, model=...)  # a {architecture}
plain = model.restore()  # the original class in float, with these weights
```
"""
    if loads:
        text += f"""
Without fractrain_fx, `transformers.{architecture}.from_pretrained({name!r})` gives the float model.
It computes in float, so its results differ from those at trained precision.
"""
    return text
