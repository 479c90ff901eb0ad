"""Widths for trainings at 40, 55 and 70 per cent of the cost of static FW-8/BW-8.

``python -m benchmarks.science.allocations --task resnet20-16px --data-dir DIR`` trains the task's model in float for
some steps, measures its sensitivities on further batches (``benchmarks/science/allocations/TASK.json``), and writes the
settings (``TASK.yaml``).

``allocated-40``: the widths of ``allocate``. ``priced-40``: the same with the task's own price of noise, as
``benchmarks.numerics.price`` measured it. ``ends-high-40``: the rule of thumb, 8 bits in the first and the last
block, and one precision elsewhere. ``uniform-40``: one precision everywhere. The last two take the dearest precision
that the budget allows.

The first and last layer are float in all of them. ``--outer`` measures these layers too (``TASK-outer.json``), and
writes the settings ``allocated-outer-40`` and ``uniform-outer-40``, which round them. ``--samples`` measures the same
with a range for each sample (``TASK-outer-samples.json``), and writes ``allocated-samples-outer-40``,
``uniform-samples-outer-40``, both at 30 % too, and ``rising-allocated-samples-outer-40``, which is for ``pfq`` and
costs as much on average over its five stages.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from fractrain_fx import AffineConfig, FracConfig, Pin, Precision, allocate, sensitivity
from fractrain_fx.durable import write_text
from fractrain_fx.numerics.sensitivity import Sensitivities
from fractrain_fx.training import RunSettings, new_run
from fractrain_fx.training.data.loader import Share, by_name, make_loader

__all__ = ["allocated_settings", "settings_under", "settings_with_outer", "settings_with_samples"]

FOLDER = Path(__file__).parent / "allocations"
BUDGETS = (40, 55, 70)
_FULL, _LEAST = Precision(8, 8), Precision(3, 4)
_LADDER = [Precision(fw, bw) for fw, bw in product(range(2, 9), range(4, 9)) if fw <= bw <= fw + 2]
_STEPS, _BATCHES = 200, 8
_WITH_OUTER, _WITH_SAMPLES = "-outer", "-outer-samples"
_FINE_BUDGETS, _RISING = (30, 40), (30, 35, 40, 45, 50)  # per cent; the stages' mean is 40
_ROUNDED = 0.49  # FW-4/BW-6 costs 40.4 %
# The language model begins with an embedding, so no layer is its first.
_OUTER = {"resnet20-16px": ("first", "last"), "characters": ("last",)}
_NOISE_PRICES = {"resnet20-16px": 0.3, "characters": 0.04}  # docs/results/noise-price.jsonl


@cache
def allocated_settings(task: str) -> Mapping[str, Mapping[str, Any]]:
    """The settings that were found for a task, by name; empty if none were."""
    settings: dict[str, dict[str, Any]] = {}
    for kind in ("", _WITH_OUTER, _WITH_SAMPLES):
        if (path := FOLDER / f"{task}{kind}.yaml").is_file():
            settings |= yaml.safe_load(path.read_text(encoding="utf-8"))
    return settings


def settings_under(sensitivities: Sensitivities, task: str) -> dict[str, dict[str, Any]]:
    """The settings of every rule, and every budget within reach, from the sensitivities of a task's model."""
    settings: dict[str, dict[str, Any]] = {}
    ends = {sensitivities.measured[0].block, sensitivities.measured[-1].block}
    for per_cent in BUDGETS:
        budget = (per_cent + _ROUNDED) / 100 * sensitivities.cost(_FULL)
        if sensitivities.cost(_LEAST) > budget:  # ops that stay float may cost more
            continue
        settings[f"allocated-{per_cent}"] = {"pins": [str(pin) for pin in allocate(sensitivities, budget).pins]}
        if (price := _NOISE_PRICES.get(task)) is not None:
            chosen = allocate(sensitivities, budget, noise_price=price)
            settings[f"priced-{per_cent}"] = {"pins": [str(pin) for pin in chosen.pins]}
        mixed = {
            precision: {op.name: _FULL if op.block in ends else precision for op in sensitivities.measured}
            for precision in _LADDER
        }
        high = _dearest(budget, {precision: sensitivities.cost(bits) for precision, bits in mixed.items()})
        if high is not None:
            rules = [f"{op.name}={_FULL}" for op in sensitivities.measured if op.block in ends]
            settings[f"ends-high-{per_cent}"] = {"precision": str(high), "pins": rules}
        flat = _dearest(budget, {precision: sensitivities.cost(precision) for precision in _LADDER})
        if flat is not None:
            settings[f"uniform-{per_cent}"] = {"precision": str(flat)}
    return settings


def settings_with_outer(sensitivities: Sensitivities, task: str) -> dict[str, dict[str, Any]]:
    """The settings of every budget that round the first and last layer too; 100 % is what both cost in float."""
    settings: dict[str, dict[str, Any]] = {}
    for per_cent in BUDGETS:
        budget = _share(per_cent, task)
        pins = allocate(sensitivities, budget, noise_price=_NOISE_PRICES[task]).pins
        settings[f"allocated-outer-{per_cent}"] = {"pins": [str(pin) for pin in pins]}
        if (uniform := _uniform_with_outer(sensitivities, budget, task)) is not None:
            settings[f"uniform-outer-{per_cent}"] = uniform
    return settings


def settings_with_samples(sensitivities: Sensitivities, task: str) -> dict[str, dict[str, Any]]:
    """The settings with a range for each sample: one allocation for all steps, and at 40 % one for each fifth too."""
    price, settings = _NOISE_PRICES[task], {}
    for per_cent in _FINE_BUDGETS:
        budget = _share(per_cent, task)
        found = allocate(sensitivities, budget, noise_price=price).settings
        settings[f"allocated-samples-outer-{per_cent}"] = found
        if (uniform := _uniform_with_outer(sensitivities, budget, task)) is not None:
            settings[f"uniform-samples-outer-{per_cent}"] = {"affine": {"ranges": "sample"}, **uniform}
    stages = [_share(per_cent, task) for per_cent in _RISING]
    rising = allocate(sensitivities, stages, stages=len(stages), noise_price=price)
    return {**settings, "rising-allocated-samples-outer-40": rising.settings}


def _uniform_with_outer(sensitivities: Sensitivities, budget: float, task: str) -> dict[str, Any] | None:
    """The dearest precision within the budget, of the outer layers too."""
    flat = _dearest(budget, {precision: sensitivities.cost(precision) for precision in _LADDER})
    return None if flat is None else {"precision": str(flat), "pins": [f"{label}={flat}" for label in _OUTER[task]]}


def _share(per_cent: float, task: str) -> float:
    """A share of what static FW-8/BW-8 costs with the outer layers in float."""
    return (per_cent + _ROUNDED) / 100 * Sensitivities.from_json(FOLDER / f"{task}.json").cost(_FULL)


def _dearest(budget: float, costs: Mapping[Precision, float]) -> Precision | None:
    fitting = [precision for precision, cost in costs.items() if cost <= budget]
    return max(fitting, key=lambda precision: (costs[precision], precision.fw), default=None)


def measure(
    task: str, data_dir: str | None, steps: int, seed: int, *, outer: bool, ranges: Literal["tensor", "sample"]
) -> Sensitivities:
    """The sensitivities of a task's model after some steps in float; with ``outer`` its first and last layer's too."""
    from benchmarks.science.named import TASKS

    values = dict(TASKS[task]) | {"method": "float", "compile": False}
    settings = RunSettings.from_dict(
        values
        | {"data_dir": data_dir, "seed": seed, "device": "cpu", "epochs": 1, "epoch_steps": steps, "test_subset": 256}
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = new_run(settings, Path(folder) / "run")
        trainer.fit()
    loader = make_loader(trainer.data, Share(settings.train.batch_size, seed, torch.device("cpu")))
    batches = by_name(loader.train(steps, _BATCHES), trainer.input_name)
    if not outer:
        return sensitivity(trainer.model, batches, criterion=trainer.objective.criterion)
    pins = [Pin(label, _FULL) for label in _OUTER[task]]
    config = FracConfig(method="static", pins=pins, affine=AffineConfig(ranges=ranges))
    return sensitivity(trainer.model.restore(), batches, criterion=trainer.objective.criterion, config=config)


# The flag and the settings of each kind of measurement, which is the end of its files' names.
_KINDS = {
    "": ("", settings_under),
    _WITH_OUTER: (" --outer", settings_with_outer),
    _WITH_SAMPLES: (" --samples", settings_with_samples),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.science.allocations", description=__doc__)
    parser.add_argument("--task", nargs="+", default=["resnet20-16px", "characters"])
    parser.add_argument("--data-dir", help="folder of the data sets' files")
    parser.add_argument("--steps", type=int, default=_STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--outer", action="store_true", help="measure and allocate the first and last layer too")
    parser.add_argument("--samples", action="store_true", help="the same with a range for each sample")
    parser.add_argument("--measured", action="store_true", help="allocate anew from the file that was measured before")
    options = parser.parse_args(argv)
    FOLDER.mkdir(exist_ok=True)
    kind = _WITH_SAMPLES if options.samples else _WITH_OUTER if options.outer else ""
    flag, settings_of = _KINDS[kind]
    for task in options.task:
        path = FOLDER / f"{task}{kind}.yaml"
        measured = path.with_suffix(".json")
        if options.measured:
            sensitivities = Sensitivities.from_json(measured)
        else:
            ranges: Literal["tensor", "sample"] = "sample" if options.samples else "tensor"
            sensitivities = measure(
                task, options.data_dir, options.steps, options.seed, outer=bool(kind), ranges=ranges
            )
            sensitivities.to_json(measured)
        command = f"python -m benchmarks.science.allocations --task {task}"
        command += f" --steps {options.steps} --seed {options.seed}{flag}"
        text = yaml.safe_dump(settings_of(sensitivities, task), sort_keys=False, width=120)
        write_text(path, f"# {command}\n{text}")
        print(f"{task}: loss {sensitivities.loss:.3f}, written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
