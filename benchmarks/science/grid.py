"""The runs to train, and the grids of the results page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from benchmarks.science.allocations import allocated_settings
from benchmarks.science.named import AUTHORS_BETA, METHODS, RETIRED, SETTINGS, TASKS, Settings
from fractrain_fx.engine.cost_term import authors_beta
from fractrain_fx.errors import ConfigError, near
from fractrain_fx.training import RunSettings
from fractrain_fx.training.override import merged
from fractrain_fx.zoo.formats import FORMAT_RECIPES

__all__ = ["GRIDS", "Run", "runs_of"]


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        task, method: keys of :data:`~benchmarks.science.named.TASKS` and ``METHODS``.
        setting: key of ``SETTINGS`` there, or several joined by ``+``.
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
        values = merged(_named(TASKS, self.task), _named(METHODS, self.method))
        for name in self.setting.split("+"):
            if name in RETIRED:
                raise ConfigError(f"setting {name!r} runs at commit 88ad369 only: git worktree add ../older 88ad369")
            values = merged(values, _named(SETTINGS, name, allocated_settings(self.task)))
        if (gate := values.get("gate", {})).get("beta") == AUTHORS_BETA:
            frac = RunSettings.from_dict(values | {"gate": {}}).frac
            values["gate"] = gate | {"beta": authors_beta(frac.gate_options, frac.gate_weight_bits)}
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


def _allocated(task: str, epochs: int) -> Iterable[Run]:
    """The runs of the settings that a command found, by three seeds; one for several stages names its method."""
    for setting, values in allocated_settings(task).items():
        yield from runs_of([task], [values.get("method", "static")], [setting], [epochs], [0, 1, 2])


_MAIN = "resnet20-16px"
# All cost at most 60 per cent of static training.
_RAMP = "cp-2.9-to-3.8"
_FINE, _RISING, _HIGH = f"fine-options+{_RAMP}", "rising-options+cp-2.6-to-4.1", "cp-2-to-4.5"
_SIGN = f"sign+{_FINE}"
_NO_SKIP = f"no-skip+{_RAMP}"
_NEEDED = "outer-8+needed"
_TUNED, _FISHER = f"sign+{_NO_SKIP}", f"fisher+{_NO_SKIP}"
_PAPER = "sign+weights-6"
_TABLE_3 = "sign+no-skip+saturate"
_FINE_TUNING = ["resnet20-fine-tuning", "characters-fine-tuning"]
_DFQ = [f"{options}cp-3.8" for options in ("fine-options+", "rising-options+", "")]
_PFQ = ["default", "stages-from-4", "stages-from-5"]
_TEXTS = ["characters", "wikitext-characters"]
GRIDS: dict[str, list[Run]] = {
    "quick": runs_of(["digits"], ["static"], epochs=[4])
    + runs_of(["digits"], ["fractrain"], ["default", "sign"], epochs=[4]),
    "main": [
        *runs_of([_MAIN], ["fractrain"], [_TUNED, _FISHER, "fisher+no-skip+cp-2.6-to-3.2"]),
        *runs_of([_MAIN], ["fractrain"], [_FINE, _SIGN, _RISING, _HIGH]),
        *runs_of([_MAIN], ["static"]),
        *runs_of([_MAIN], ["pfq"], _PFQ),
        *runs_of([_MAIN], ["dfq"], ["sign+no-skip+cp-3.8", *_DFQ, f"sign+{_DFQ[0]}"]),
        *runs_of([_MAIN], ["float"]),
    ],
    "cost": runs_of([_MAIN], ["static"], epochs=[12, 8, 4, 2])
    + runs_of([_MAIN], ["fractrain"], [_TUNED, _FINE, _SIGN, _HIGH], [12, 8, 4]),
    "seeds": runs_of([_MAIN], ["static"], epochs=[20, 12], seeds=[1, 2])
    + runs_of([_MAIN], ["fractrain"], [_TUNED, _FISHER, _FINE, _SIGN, _RISING, _HIGH], seeds=[1, 2])
    + runs_of([_MAIN], ["pfq"], _PFQ, seeds=[1, 2])
    + runs_of([_MAIN], ["dfq"], _DFQ, seeds=[1, 2]),
    # The tuned setting, and what each of its parts is worth.
    "ablation": runs_of(
        [_MAIN],
        ["fractrain"],
        [
            _TUNED,
            *(_NO_SKIP, _FISHER, f"sign+fisher+{_NO_SKIP}"),
            *(f"sign+{change}+{_NO_SKIP}" for change in ("authors-strength", "linear-init", "peak-rate", "zero-grid")),
            # The same with blocks that can be skipped.
            *(_FINE, _SIGN, f"peak-rate+{_FINE}", f"linear-init+{_FINE}", f"rising-options+{_RAMP}", _RAMP),
        ],
        epochs=[8],
    ),
    # The best use of the same cost: more bits for weights, or more expensive options for samples that need them. In the
    # last, the dearest options cost far more than the last target, so that gates can still choose in the last stage.
    "spending": runs_of(
        [_MAIN],
        ["fractrain"],
        [
            *("weights-6+cp-1.5-to-5.4", "weights-6+cp-2-to-4.5", "wide-options+cp-2-to-4.5"),
            *("authors-options+cp-2-to-4.5", "wide-options+weights-6+cp-2-to-4.5"),
        ],
    ),
    # Accuracy against cost, from a third of static FW-8/BW-8's cost to 70 %: uniform precisions, and their rivals.
    "frontier": [
        *runs_of([_MAIN], ["pfq"], ["outer-8+samples+stages-4-to-8", "outer-8+samples+stages-4-to-6"], seeds=[0, 1, 2]),
        *runs_of(
            [_MAIN], ["pfq"], [f"{_NEEDED}+stages-{which}" for which in ("4-to-6-bw-6", "5-then-8")], seeds=[0, 1, 2]
        ),
        *runs_of([_MAIN], ["static"], [f"{_NEEDED}+fw-{bits}-bw-6" for bits in (5, 6)], seeds=[0, 1, 2]),
        *runs_of([_MAIN], ["static"], [f"outer-8+fw-{bits}-bw-6" for bits in (4, 5, 6)], seeds=[0, 1, 2]),
        *runs_of([_MAIN], ["static"], ["fw-4-bw-6"]),
        *runs_of([_MAIN], ["pfq"], ["stages-to-6", "stages-to-5"]),
        *runs_of([_MAIN], ["fractrain"], ["sign+no-skip+cp-1.8-to-2.6"]),
        *runs_of([_MAIN], ["static"], ["fw-3-bw-6", "fw-5-bw-6", "fw-4-bw-8", "fw-6-bw-6", "fw-5-bw-8", "fw-6-bw-8"]),
        *runs_of([_MAIN], ["pfq"], ["stages-to-4"]),
        *runs_of([_MAIN], ["fractrain"], ["sign+no-skip+cp-1.4-to-2"]),
        *runs_of([_MAIN], ["dfq"], ["sign+no-skip+cp-2.6"]),
    ],
    # Bits where they count, beside the rule of thumb and one precision for all, at 40, 55 and 70 % of static's cost.
    "allocated": [
        *_allocated(_MAIN, 20),
        *_allocated(_TEXTS[0], 4),
    ],
    "frontier-text": [
        *runs_of(["characters"], ["static"], ["default", "last-8+rows+fw-6-bw-6"], [4], [0, 1, 2]),
        *runs_of(["characters"], ["static"], ["last-8", "last-8+fw-6-bw-8"], [4]),
        *runs_of(["characters"], ["static"], ["fw-4-bw-6", "fw-5-bw-6", "fw-6-bw-6", "fw-5-bw-8", "fw-3-bw-6"], [4]),
        *runs_of(["characters"], ["pfq"], ["stages-to-6", "stages-to-5"], [4]),
        *runs_of(["characters"], ["fractrain"], ["sign+no-skip+cp-1.8-to-2.6"], [4]),
        *runs_of(["characters"], ["dfq"], ["sign+no-skip+cp-2.6", "sign+no-skip+cp-3.4"], [4]),
    ],
    # What `FracConfig()` gives against the paper's options and targets, with stages of equal length in both.
    "defaults": [
        *runs_of(["characters"], ["fractrain"], [_TUNED, _PAPER], [4], [0, 1, 2]),
        *runs_of(_FINE_TUNING[:1], ["static"], epochs=[6], seeds=[0, 1, 2]),
        *runs_of(_FINE_TUNING[:1], ["fractrain"], [_TUNED, _PAPER], [6], [0, 1, 2]),
        *runs_of(_FINE_TUNING[1:], ["static"], epochs=[4], seeds=[0, 1, 2]),
        *runs_of(_FINE_TUNING[1:], ["fractrain"], [_TUNED, _PAPER], [4], [0, 1, 2]),
        *runs_of([_MAIN], ["fractrain"], [_TUNED, _PAPER], [8], [0, 1, 2]),
        *runs_of(["characters"], ["pfq"], ["stages-from-5", "default"], [4], [0, 1, 2]),
        *runs_of(_FINE_TUNING[:1], ["pfq"], ["stages-from-5", "default"], [6], [0, 1, 2]),
        *runs_of(_FINE_TUNING[1:], ["pfq"], ["stages-from-5", "default"], [4], [0, 1, 2]),
        *runs_of([_MAIN], ["pfq"], ["stages-from-5", "default"], [8], [0, 1, 2]),
    ],
    "others": runs_of([_MAIN], ["slu", "dorefa", "wageubn"]),
    # The paper's targets, which cost 42 per cent of static training.
    "paper": runs_of([_MAIN], ["dfq", "fractrain"], ["default", "authors-options", "sign+authors-strength"]),
    # The paper's training of table 3, in its stages, options and targets, and in the options that train best here.
    "protocol": [
        *runs_of([_MAIN], ["static"], ["drops"], [160]),
        *runs_of(
            [_MAIN],
            ["fractrain"],
            [f"drops+algorithm-1+{suffix}" for suffix in (f"outer-8+{_TABLE_3}", _TABLE_3, _PAPER)],
            [160],
        ),
        *runs_of([_MAIN], ["pfq"], ["drops+algorithm-1"], [160]),
        *runs_of([_MAIN], ["static"], ["drops+fw-6-bw-6"], [160]),
        *runs_of([_MAIN], ["static"], ["drops"], [160], [1]),
    ],
    # The paper's Transformer has 16 backward bits, and only its linear layers are quantized.
    "language": [
        *runs_of(_TEXTS, ["float", "static"], epochs=[4]),
        *runs_of(_TEXTS, ["static"], ["bw-16"], epochs=[4]),
        *runs_of(_TEXTS, ["pfq"], ["stages-to-16", "stages-from-4-to-16"], epochs=[4]),
        *runs_of(_TEXTS, ["fractrain"], [_TUNED, _FINE, "cp-2-to-4.5"], epochs=[4]),
        *runs_of(_TEXTS[:1], ["static"], ["bw-16+linear-only"], epochs=[4]),
        *runs_of(_TEXTS[:1], ["pfq"], ["stages-from-4-to-16+linear-only"], epochs=[4]),
        *runs_of(_TEXTS[:1], ["pfq"], ["default", "stages-to-16+linear-only"], epochs=[4]),
        *runs_of(_TEXTS[:1], ["fractrain"], ["default"], epochs=[4]),
    ],
    "formats": [
        *runs_of(["characters-short"], ["float", "bf16", *FORMAT_RECIPES], epochs=[20], seeds=[0, 1, 2]),
        *runs_of(["resnet20-short"], ["float", "bf16", *FORMAT_RECIPES], epochs=[6], seeds=[0, 1, 2]),
    ],
    "raise": runs_of(
        ["characters-raise", "words-raise", "resnet20-raise"],
        ["bf16", "mxfp8", "mxfp4", *(f"mxfp4-{share}-mxfp8" for share in (50, 75, 90, "auto", "auto-100"))],
        epochs=[10],
        seeds=[0, 1, 2],
    ),
    "larger": [
        *runs_of(["mobilenetv2-16px"], ["static"], epochs=[12]),
        *runs_of(["mobilenetv2-16px"], ["fractrain"], [_TUNED], [12]),
        *runs_of(["mobilenetv2-16px-depthwise"], ["static"], epochs=[12]),
        *runs_of(["mobilenetv2-16px-depthwise"], ["fractrain"], [_TUNED, _FISHER], [12]),
        *runs_of(["mobilenetv2-16px-stem"], ["static"], epochs=[12]),
        *runs_of(["mobilenetv2-16px-stem"], ["fractrain"], [_TUNED, _FISHER], [12]),
        *runs_of(["resnet38"], ["static"]),
        *runs_of(["resnet38"], ["fractrain"], [_TUNED]),
    ],
}
"""In the order of their worth."""


def _named(known: Mapping[str, Settings], name: str, of_task: Mapping[str, Settings] | None = None) -> Settings:
    if of_task is not None:
        known = {**known, **of_task}
    if name not in known:
        raise ConfigError(f"{name!r} is unknown: write one of {', '.join(known)}.{near(name, known)}")
    return known[name]
