"""The tasks, methods and settings that a run is made of, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fractrain_fx.config import AUTHORS_OPTIONS, DFQ_OPTIONS, FINE_OPTIONS
from fractrain_fx.zoo.formats import FORMAT_RECIPES

__all__ = ["AUTHORS_BETA", "METHODS", "RETIRED", "SETTINGS", "TASKS", "Settings"]

Settings = Mapping[str, Any]

# Model, data and loop. Learning rate 0.1 with a cosine after one epoch of warm-up: the default of `fractrain train`.
_CIFAR = {"data": "cifar10", "batch_size": 128}
_MOBILE: Settings = {"model": "zoo:mobilenetv2", "image_size": 16, "compile": True, **_CIFAR}
_RAISE = {"epoch_steps": 150, "schedule": {"every": "25 steps"}, "compile": True}
_TEXT_RAISE = {"model": "hf:gpt2", "batch_size": 16, "test_subset": 512, "lr": 2e-3, "warm_up": 0.05, **_RAISE}
TASKS: dict[str, Settings] = {
    "resnet20-16px": {"model": "zoo:resnet20", "image_size": 16, **_CIFAR},
    "resnet38": {"model": "zoo:resnet38", "compile": True, **_CIFAR},
    "mobilenetv2-16px": _MOBILE,
    # The same with the paper's rule: in float, depthwise convolutions are half of what static training costs.
    "mobilenetv2-16px-depthwise": {**_MOBILE, "pins": ["depthwise=FW-8/BW-16"]},
    # And with 8 bits in the first convolution, which has 1 % of the MACs and in float 13 % of what static costs.
    "mobilenetv2-16px-stem": {**_MOBILE, "pins": ["depthwise=FW-8/BW-16", "first=FW-8/BW-8"]},
    "digits": {"model": "zoo:resnet20", "data": "digits", "image_size": 16, "batch_size": 32},
    "digits-tiny": {"model": "zoo:resnet20", "data": "digits", "image_size": 8, "batch_size": 32, "subset": 96},
    # 4 epochs of tiny-shakespeare are 1,960 steps; the rate rises over the first 100. train.txt has its first 1,003,854
    # characters (90 %), test.txt the others.
    "characters": {"model": "hf:gpt2", "data": "characters", "batch_size": 32, "lr": 2e-3, "warm_up": 0.05},
    # A network trained in float on one half of the samples, and then on the other half at a tenth of the rate.
    "resnet20-fine-tuning": {
        **{"model": "zoo:resnet20", "image_size": 16, "setting": "fine-tuning", "pretrain_epochs": 16, "lr": 0.01},
        **_CIFAR,
    },
    "characters-fine-tuning": {
        **{"model": "hf:gpt2", "data": "characters", "setting": "fine-tuning", "pretrain_epochs": 4},
        **{"batch_size": 32, "lr": 5e-4, "warm_up": 0.05},
    },
    # "characters" with four layers, on WikiText-2's validation text: 4 epochs are 2,188 steps.
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
        **{"batch_size": 4, "lr": 1e-3, "pins": ["lm_head=bfloat16"], "compile": False, "run": {"backend": "cpu"}},
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
_STAGED = {"schedule": "manual", "run": {"backend": "cpu"}}
# Written out, so that a run is the same whatever the package takes by default.
_STEERED = {"gate_lr": "model", "gate": {"init": "he", "control": "multiplier"}}
_GATED = {**_STAGED, **_STEERED, "options": [*map(str, DFQ_OPTIONS)], "weight_bits": 4}


def _raised(few: int, many: int) -> Settings:
    """MXFP4 and then MXFP8, in parts of the run."""
    bits = ",".join(["4"] * few + ["8"] * many)
    return {"method": "pfq", "schedule": "manual", "format": "mx", "stages": f"FW({bits})/BW({bits})"}


_AUTO = {"method": "pfq", "format": "mx", "stages": "FW(4,8)/BW(4,8)"}
METHODS: dict[str, Settings] = {
    "float": {"method": "float"},
    "static": {"method": "static", "precision": "FW-8/BW-8", "run": {"backend": "cpu"}},
    "pfq": {"method": "pfq", "stages": "FW(3,4,6,8)/BW(6,6,8,8)", **_STAGED},
    "dfq": {"method": "dfq", "targets": [3.0], **_GATED},
    "fractrain": {"method": "fractrain", "targets": [1.5, 2.0, 2.5, 3.0], **_GATED},
    "slu": {"method": "slu", "schedule": "manual", **_STEERED},
    "dorefa": {"method": "static", "precision": "FW-8/BW-8", "format": "dorefa"},
    "wageubn": {"method": "static", "precision": "FW-8/BW-8", "format": "wageubn"},
    "bf16": {"method": "static", "precision": "FW-16/BW-16", "format": "mx"},
    **{
        name: {
            "method": "static",
            "precision": str(preset.precision),
            "format": preset.recipe.format,
            "format_recipe": name,
        }
        for name, preset in FORMAT_RECIPES.items()
    },
    # MXFP4, then MXFP8: from a share of the run on, or when the loss flattens.
    "mxfp4-50-mxfp8": _raised(1, 1),
    "mxfp4-75-mxfp8": _raised(3, 1),
    "mxfp4-90-mxfp8": _raised(9, 1),
    "mxfp4-auto-mxfp8": _AUTO,
    "mxfp4-auto-100-mxfp8": {**_AUTO, "schedule": {"every": "100 steps"}},
}

AUTHORS_BETA = "authors_beta(options, weight_bits)"
"""Stands for the number, which depends on other settings."""

# Each setting changes one thing. Several are joined by "+".
SETTINGS: dict[str, Settings] = {
    "default": {},
    "peak-rate": {"gate_lr": "peak"},
    "linear-init": {"gate": {"init": "linear"}},
    "sign": {"gate": {"control": "sign"}},
    "fisher": {"gate": {"gradient": "fisher"}},
    "authors-strength": {"gate": {"beta": AUTHORS_BETA}},
    "authors-options": {"options": [str(option) for option in AUTHORS_OPTIONS], "targets": {"saturate": True}},
    "wide-options": {"options": [*map(str, DFQ_OPTIONS), "FW-8/BW-8", "FW-8/BW-12"]},
    # Every option has more forward bits than the one before: a gate's gradient shows what those are worth, and nothing
    # of what backward bits are worth.
    "rising-options": {"options": ["FW-0/BW-0", "FW-3/BW-6", "FW-4/BW-8", "FW-6/BW-8", "FW-8/BW-8"]},
    # The same in steps of a bit: a mixture of distant options has more noise than the option in between.
    "fine-options": {"options": [*map(str, FINE_OPTIONS)]},
    # The same, and every block computes for every sample.
    "no-skip": {"options": [*map(str, FINE_OPTIONS[1:])]},
    # The cheapest option where a target is below it.
    "saturate": {"targets": {"saturate": True}},
    "bw-16": {"precision": "FW-8/BW-16"},
    # Static precisions below FW-8/BW-8, for what schedules and choices have to beat at the same cost.
    **{
        f"fw-{forward}-bw-{backward}": {"precision": f"FW-{forward}/BW-{backward}"}
        for forward, widths in {3: (6,), 4: (3, 4, 6, 8), 5: (3, 4, 6, 8), 6: (3, 4, 6, 8)}.items()
        for backward in widths
    },
    "by-length": {"schedule": "by-length"},
    # The paper's training: the rate drops at half and at three quarters, and Algorithm 1 alone ends a stage.
    "drops": {"lr_schedule": "steps", "warm_up": 0},
    "algorithm-1": {"schedule": "auto"},
    # In float, as they are by default, the first layer is a tenth of what static ResNet-20 costs, and the last one a
    # third of what the language model of two layers costs, which begins with an embedding.
    "outer-8": {"pins": ["first=FW-8/BW-8", "last=FW-8/BW-8"]},
    "last-8": {"pins": ["last=FW-8/BW-8"]},
    # PFQ that ends below FW-8/BW-8.
    "stages-to-4": {"stages": "FW(3,3,4,4)/BW(6,6,6,6)"},
    "stages-to-5": {"stages": "FW(3,4,4,5)/BW(6,6,6,6)"},
    "stages-to-6": {"stages": "FW(3,4,5,6)/BW(6,6,6,6)"},
    # The same with gradients at 4 bits, for ranges in which those have little noise.
    "stages-4-to-6": {"stages": "FW(4,4,5,6)/BW(4,4,4,6)"},
    "stages-4-to-6-bw-6": {"stages": "FW(4,4,5,6)/BW(6,6,6,6)"},
    # Few bits while the rate is high, and all of them for the last fifth, in which it falls to 0.
    "stages-5-then-8": {"stages": "FW(5,5,5,5,8)/BW(6,6,6,6,8)"},
    "stages-4-to-8": {"stages": "FW(4,5,6,8)/BW(4,4,4,4)"},
    "stages-to-16": {"stages": "FW(3,4,6,8)/BW(6,8,12,16)"},
    # Without the cheapest stages. Both take about three quarters of the MACs of static training.
    "stages-from-5": {"stages": "FW(5,6,7,8)/BW(8,8,8,8)"},
    "stages-from-4": {"stages": "FW(4,6,8,8)/BW(6,8,8,8)"},
    "stages-from-4-to-16": {"stages": "FW(4,6,8,8)/BW(8,12,16,16)"},
    "linear-only": {"attention": "float"},
    "weights-5": {"weight_bits": 5},
    "weights-6": {"weight_bits": 6},
    # Skipped samples are left out of their block: batch norm does not see them, and their gates get the cost alone.
    "execution-auto": {"run": {"skipping": "left-out", "backend": "codes"}},
    # A range for each sample, or for each row of a product, which no C++ kernel rounds.
    "samples": {"affine": {"ranges": "sample"}},
    "rows": {"affine": {"ranges": "row"}, "run": {"backend": "plain"}},
    # Each sample's gradient in as many bits as its levels take.
    "needed": {"affine": {"gradient_bits": "needed"}},
    "zero-grid": {"affine": {"gradient_grid": "zero"}},
    "cp-2-to-4.5": {"targets": [2.0, 3.0, 4.0, 4.5]},
    "cp-1.5-to-5.4": {"targets": [1.5, 2.5, 4.0, 5.4]},
    "cp-2.6-to-4.1": {"targets": [2.6, 3.2, 3.8, 4.1]},
    "cp-1.8-to-5": {"targets": [1.8, 2.8, 4.1, 5.0]},
    # As dear as cp-2.6-to-4.1, with room to choose in the last stage.
    "cp-2.9-to-3.8": {"targets": [2.9, 3.4, 3.6, 3.8]},
    # At 5 forward bits, beyond which more bits change the loss by a thousandth at most.
    "cp-2.6-to-3.2": {"targets": [2.6, 2.8, 3.0, 3.2]},
    # Targets at 30 and 40 % of static training.
    "cp-1.4-to-2": {"targets": [1.4, 1.6, 1.8, 2.0]},
    "cp-1.8-to-2.6": {"targets": [1.8, 2.0, 2.3, 2.6]},
    "cp-2.6": {"targets": [2.6]},
    "cp-3.4": {"targets": [3.4]},
    "cp-3.8": {"targets": [3.8]},
    # Nearly FW-8/BW-8 throughout: what is lost beside static is the price of 4-bit weights.
    "cp-4.1": {"targets": [4.1]},
}

# Settings of the package at commit 88ad369, where their command runs.
RETIRED: dict[str, Settings] = {
    "proportional": {"gate": {"control": "proportional"}},
    "integral": {"gate": {"control": "integral"}},
}
