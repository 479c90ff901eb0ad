"""The runs to train: tasks, methods and settings by name, and the grids of the results page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from fractrain_fx.config import AUTHORS_OPTIONS, DFQ_OPTIONS
from fractrain_fx.errors import ConfigError, near
from fractrain_fx.training import RunSettings
from fractrain_fx.zoo.formats import FORMAT_RECIPES

__all__ = ["GRIDS", "METHODS", "SETTINGS", "TASKS", "Run", "runs_of"]

Settings = Mapping[str, Any]

# Model, data and loop. Learning rate 0.1 with a cosine after one epoch of warm-up: the default of `fractrain train`.
_CIFAR = {"data": "cifar10", "batch_size": 128}
_RAISE = {"epoch_steps": 150, "every": "25 steps", "compile": True}
_TEXT_RAISE = {"model": "hf:gpt2", "batch_size": 16, "test_subset": 512, "lr": 2e-3, "warm_up": 0.05, **_RAISE}
TASKS: dict[str, Settings] = {
    "resnet20-16px": {"model": "zoo:resnet20", "image_size": 16, **_CIFAR},
    "resnet38": {"model": "zoo:resnet38", **_CIFAR},
    "mobilenetv2-16px": {"model": "zoo:mobilenetv2", "image_size": 16, **_CIFAR},
    "digits": {"model": "zoo:resnet20", "data": "digits", "image_size": 16, "batch_size": 32},
    "digits-tiny": {"model": "zoo:resnet20", "data": "digits", "image_size": 8, "batch_size": 32, "subset": 96},
    # 4 epochs of tiny-shakespeare are 1,960 steps; the rate rises over the first 100.
    "characters": {"model": "hf:gpt2", "data": "characters", "batch_size": 32, "lr": 2e-3, "warm_up": 0.05},
    # The same with four layers, on WikiText-2's validation text: 4 epochs are 2,188 steps.
    "wikitext-characters": {
        **{"model": "benchmarks/formats/gpt2.py:four_layers", "data": "characters", "batch_size": 32},
        **{"lr": 2e-3, "warm_up": 0.05, "test_subset": 4096},
    },
    # Short runs to compare number formats. An epoch is a window of 30 steps, so that stages can change in between.
    "characters-short": {
        **{"model": "hf:gpt2", "data": "characters", "batch_size": 16, "epoch_steps": 30, "test_subset": 128},
        **{"lr": 2e-3, "warm_up": 0.05},
    },
    # MXFP4 and a raise to MXFP8, which may come every 25 steps; 1,500 steps in 10 parts, each with an evaluation.
    "characters-raise": {"data": "characters", **_TEXT_RAISE},
    # Four layers, and a head for 14,000 words. In batches of 4, a rate of 2e-3 is too high: bfloat16 ends worse.
    "words-raise": {
        **{"data": "text", **_TEXT_RAISE, "model": "benchmarks/formats/gpt2.py:four_layers"},
        **{"batch_size": 4, "lr": 1e-3, "pins": ["lm_head=bfloat16"], "compile": False, "rounding": "compiled"},
    },
    "resnet20-raise": {
        **{"model": "zoo:resnet20", "data": "cifar10", "image_size": 16, "batch_size": 64, "test_subset": 2000},
        **_RAISE,
    },
    "resnet20-short": {
        **{"model": "zoo:resnet20", "data": "cifar10", "image_size": 16, "batch_size": 64},
        **{"subset": 2048, "test_subset": 2000},
    },
    "pydoc": {"model": "hf:gpt2", "data": "pydoc", "subset": 512, "test_subset": 256, "batch_size": 32},
}

# Stages of equal length: with 20 epochs Algorithm 1 would see too few losses.
_STAGED = {"schedule": "manual", "rounding": "compiled"}
_GATED = _STAGED | {"weight_bits": 4}


def _raised(few: int, many: int) -> Settings:
    """MXFP4 and then MXFP8, in parts of the run."""
    bits = ",".join(["4"] * few + ["8"] * many)
    return {"method": "pfq", "schedule": "manual", "format": "mx", "stages": f"FW({bits})/BW({bits})"}


_AUTO = {"method": "pfq", "format": "mx", "stages": "FW(4,8)/BW(4,8)"}
METHODS: dict[str, Settings] = {
    "float": {"method": "float"},
    "static": {"method": "static", "precision": "FW-8/BW-8", "rounding": "compiled"},
    "pfq": {"method": "pfq", **_STAGED},
    "dfq": {"method": "dfq", "targets": [3.0], **_GATED},
    "fractrain": {"method": "fractrain", "targets": [1.5, 2.0, 2.5, 3.0], **_GATED},
    "slu": {"method": "slu", "schedule": "manual"},
    "dorefa": {"method": "static", "precision": "FW-8/BW-8", "format": "dorefa"},
    "wageubn": {"method": "static", "precision": "FW-8/BW-8", "format": "wageubn"},
    "bf16": {"method": "static", "precision": "FW-16/BW-16", "format": "mx"},
    **{
        name: {
            "method": "static",
            "precision": str(each.precision),
            "format": each.recipe.format,
            "format_recipe": name,
        }
        for name, each in FORMAT_RECIPES.items()
    },
    # MXFP4, then MXFP8: from a share of the run on, or when the loss flattens.
    "mxfp4-50-mxfp8": _raised(1, 1),
    "mxfp4-75-mxfp8": _raised(3, 1),
    "mxfp4-90-mxfp8": _raised(9, 1),
    "mxfp4-auto-mxfp8": _AUTO,
    "mxfp4-auto-100-mxfp8": {**_AUTO, "every": "100 steps"},
}

# Each setting changes one thing. Several are joined by "+".
_MULTIPLIER = {"gate_lr": "model", "gate": {"init": "he", "control": "multiplier"}}
SETTINGS: dict[str, Settings] = {
    "default": {},
    "steered": _MULTIPLIER,
    "model-rate": {"gate_lr": "model"},
    "he": {"gate": {"init": "he"}},
    "proportional": {"gate": {"control": "proportional"}},
    "integral": {"gate": {"control": "integral"}},
    "multiplier": {"gate": {"control": "multiplier"}},
    "authors-strength": {"gate": {"beta": 1e-3, "beta_unit": "full-precision"}},
    "authors-options": {"options": [str(each) for each in AUTHORS_OPTIONS], "saturate_targets": True},
    "wide-options": {"options": [*map(str, DFQ_OPTIONS), "FW-8/BW-8", "FW-8/BW-12"]},
    # Every option has more forward bits than the one before: a gate's gradient shows what those are worth, and nothing
    # of what backward bits are worth.
    "rising-options": {"options": ["FW-0/BW-0", "FW-3/BW-6", "FW-4/BW-8", "FW-6/BW-8", "FW-8/BW-8"]},
    # The same in steps of a bit: a mixture of distant options has more noise than the option in between.
    "fine-options": {"options": ["FW-0/BW-0", "FW-3/BW-6", *(f"FW-{bits}/BW-8" for bits in range(4, 9))]},
    "bw-16": {"precision": "FW-8/BW-16"},
    "stages-to-16": {"stages": "FW(3,4,6,8)/BW(6,8,12,16)"},
    # The dearer half of the default stages, one stage earlier: what the cheapest stage costs in accuracy.
    "stages-from-4": {"stages": "FW(4,6,8,8)/BW(6,8,8,8)"},
    "stages-from-4-to-16": {"stages": "FW(4,6,8,8)/BW(8,12,16,16)"},
    "linear-only": {"attention": "float"},
    "weights-6": {"weight_bits": 6},
    # Skipped samples are left out of their block: batch norm does not see them, and their gates get the cost alone.
    "execution-auto": {"execution": "auto"},
    "zero-grid": {"gradient_grid": "zero"},
    "cp-2-to-4.5": {"targets": [2.0, 3.0, 4.0, 4.5]},
    "cp-1.5-to-5.4": {"targets": [1.5, 2.5, 4.0, 5.4]},
    "cp-2.6-to-4.1": {"targets": [2.6, 3.2, 3.8, 4.1]},
    "cp-1.8-to-5": {"targets": [1.8, 2.8, 4.1, 5.0]},
    # As dear as cp-2.6-to-4.1, with room to choose in the last stage.
    "cp-2.9-to-3.8": {"targets": [2.9, 3.4, 3.6, 3.8]},
    "cp-3.4": {"targets": [3.4]},
    "cp-3.8": {"targets": [3.8]},
    # Nearly FW-8/BW-8 throughout: what is lost beside static is the price of 4-bit weights.
    "cp-4.1": {"targets": [4.1]},
}


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        task, method: keys of ``TASKS`` and ``METHODS``.
        setting: key of ``SETTINGS``, or several joined by ``+``.
        epochs: length of the run; schedules of learning rate and stages span it.
        seed: seed of weights, order and noise.
    """

    task: str
    method: str
    setting: str = "default"
    epochs: int = 20
    seed: int = 0

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.task}-{self.method}-{self.setting}-{self.epochs}epochs-seed{self.seed}"

    @property
    def values(self) -> dict[str, Any]:
        """The settings, as ``RunSettings.from_dict`` takes them.

        Raises:
            ConfigError: a name is unknown, or the parts do not fit together.
        """
        values = dict(_named(TASKS, self.task)) | dict(_named(METHODS, self.method))
        for name in self.setting.split("+"):
            values = _merged(values, _named(SETTINGS, name))
        values |= {"epochs": self.epochs, "seed": self.seed, "device": "cpu"}
        RunSettings.from_dict(values)
        return values


def runs_of(
    tasks: Iterable[str],
    methods: Iterable[str],
    settings: Iterable[str] = ("default",),
    epochs: Iterable[int] = (20,),
    seeds: Iterable[int] = (0,),
) -> list[Run]:
    """Every combination, seed by seed."""
    return [Run(*axes, seed) for seed, axes in product(seeds, product(tasks, methods, settings, epochs))]


_MAIN = "resnet20-16px"
# Both cost less than 60 per cent of static training.
_HIGH, _WIDE = "steered+cp-2-to-4.5", "steered+weights-6+cp-1.5-to-5.4"
_RISING = "steered+rising-options+cp-2.6-to-4.1"
_FINE = "steered+fine-options+cp-2.9-to-3.8"
_DFQ = ["steered+fine-options+cp-3.8", "steered+rising-options+cp-3.8", "steered+cp-3.8"]
_TEXTS = ["characters", "wikitext-characters"]
# The dearest options cost far more than the last target, so that gates can still choose in the last stage.
_FREE = "steered+wide-options+weights-6+cp-2-to-4.5"
GRIDS: dict[str, list[Run]] = {
    "quick": runs_of(["digits"], ["static"], epochs=[4])
    + runs_of(["digits"], ["fractrain"], ["default", "steered"], epochs=[4]),
    "main": [
        *runs_of([_MAIN], ["fractrain"], [_FINE, _RISING, _HIGH, _WIDE, _FREE]),
        *runs_of([_MAIN], ["static", "pfq"]),
        *runs_of([_MAIN], ["fractrain"], ["steered"]),
        *runs_of([_MAIN], ["pfq"], ["stages-from-4"]),
        *runs_of([_MAIN], ["dfq"], ["steered", *_DFQ]),
        *runs_of([_MAIN], ["float"]),
    ],
    # The best use of the same cost: more bits for weights, or more expensive options for samples that need them.
    "spending": runs_of(
        [_MAIN],
        ["fractrain"],
        ["steered+weights-6+cp-2-to-4.5", "steered+wide-options+cp-2-to-4.5", "steered+authors-options+cp-2-to-4.5"],
    ),
    "cost": runs_of([_MAIN], ["static"], epochs=[12, 8, 4])
    + runs_of([_MAIN], ["fractrain"], [_FINE, _HIGH], [12, 8, 4]),
    "ablation": runs_of(
        [_MAIN],
        ["fractrain"],
        [
            "steered+authors-options",
            "model-rate+he+integral",
            "steered+weights-6",
            "steered+zero-grid",
            "model-rate+multiplier",
            "he+multiplier",
            "model-rate+he+proportional",
            "model-rate+he+authors-strength",
            "model-rate+authors-strength",
            "default",
        ],
    ),
    "seeds": runs_of([_MAIN], ["static", "pfq"], seeds=[1, 2])
    + runs_of([_MAIN], ["fractrain"], [_FINE, _RISING, "steered", _HIGH], seeds=[1, 2])
    + runs_of([_MAIN], ["pfq"], ["stages-from-4"], seeds=[1, 2])
    + runs_of([_MAIN], ["dfq"], _DFQ, seeds=[1, 2]),
    "others": runs_of([_MAIN], ["slu"], ["steered"]) + runs_of([_MAIN], ["dorefa", "wageubn"]),
    # The paper's Transformer has 16 backward bits, and only its linear layers are quantized.
    "language": [
        *runs_of(_TEXTS, ["float", "static"], epochs=[4]),
        *runs_of(_TEXTS, ["static"], ["bw-16"], epochs=[4]),
        *runs_of(_TEXTS, ["pfq"], ["stages-to-16", "stages-from-4-to-16"], epochs=[4]),
        *runs_of(_TEXTS, ["fractrain"], ["steered+cp-2-to-4.5"], epochs=[4]),
        *runs_of(_TEXTS[:1], ["static"], ["bw-16+linear-only"], epochs=[4]),
        *runs_of(_TEXTS[:1], ["pfq"], ["stages-from-4-to-16+linear-only"], epochs=[4]),
        *runs_of(_TEXTS[:1], ["pfq"], ["default", "stages-to-16+linear-only"], epochs=[4]),
        *runs_of(_TEXTS[:1], ["fractrain"], ["steered"], epochs=[4]),
    ],
    "formats": [
        *runs_of(["characters-short"], ["float", "bf16", *FORMAT_RECIPES], epochs=[20]),
        *runs_of(["resnet20-short"], ["float", "bf16", *FORMAT_RECIPES], epochs=[6]),
    ],
    "raise": runs_of(
        ["characters-raise", "words-raise", "resnet20-raise"],
        ["bf16", "mxfp8", "mxfp4", *(f"mxfp4-{share}-mxfp8" for share in (50, 75, 90, "auto", "auto-100"))],
        epochs=[10],
        seeds=[0, 1, 2],
    ),
    "larger": runs_of(["resnet38"], ["static"]) + runs_of(["resnet38"], ["fractrain"], [_HIGH]),
}
"""In the order of their worth."""


def _named(known: Mapping[str, Settings], name: str) -> Settings:
    if name not in known:
        raise ConfigError(f"{name!r} is unknown: write one of {', '.join(known)}.{near(name, known)}")
    return known[name]


def _merged(values: Settings, more: Settings) -> dict[str, Any]:
    """Later settings override earlier ones; settings of the gates are merged one by one."""
    gate = dict(values.get("gate", {})) | dict(more.get("gate", {}))
    return dict(values) | dict(more) | ({"gate": gate} if gate else {})
