"""Tensors lie on the model's device, tested without a GPU: fake CUDA tensors, the meta device, a device that computes.

Fake CUDA tensors show a forward pass as a GPU sees it; reading a value and backward need a driver. The meta device has
backward, but no values to read either. Tensors elsewhere (``tests/elsewhere.py``) have both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fractrain_fx import Engine, FracModel, RunConfig
from tests.build import paper, rewritten
from tests.elsewhere import ELSEWHERE, Elsewhere, move, put_elsewhere
from tests.models import Case, build, marks, thinned

MODELS: dict[str, Callable[[], Case]] = {
    "resnet10t": lambda: Case(timm.create_model("resnet10t", num_classes=10), (torch.randn(2, 3, 32, 32),)),
    "vit": lambda: build("vit"),
    "gpt2": lambda: build("gpt2"),
}
_MX_OPTIONS = ("FW-0/BW-0", "FW-4/BW-6", "FW-6/BW-8")

# The methods with the paper's format, and the other formats.
CONFIGS: dict[str, dict[str, Any]] = {
    **{method: {"method": method} for method in ("static", "pfq", "dfq", "fractrain")},
    "mx": {"method": "static", "format": "mx"},
    "mx-dfq": {"method": "dfq", "format": "mx", "options": _MX_OPTIONS},
    "nvfp4": {"method": "static", "format": "nvfp4", "precision": "FW-4/BW-4"},
    "fp8": {"method": "static", "format": "fp8"},
    "int": {"method": "static", "format": "int"},
    "dorefa": {"method": "dfq", "format": "dorefa"},
    "wageubn": {"method": "static", "format": "wageubn"},
}
SKIPPING = ("computed", "left-out")
QUICK = {("resnet10t", "fractrain"), ("gpt2", "static")}
# With these, every configuration runs with some model. The rest shows little more.
LONG = {
    *(("resnet10t", config) for config in ("dfq", "mx", "int", "dorefa", "nvfp4", "fp8")),
    *(("vit", config) for config in ("pfq", "mx-dfq", "wageubn")),
}
SLOW = {*product(MODELS, CONFIGS)} - QUICK - LONG


def _changes(config: str, skipping: str) -> bool:
    """Whether samples can be left out under a configuration."""
    return skipping == "computed" or CONFIGS[config]["method"] in ("dfq", "fractrain")


@pytest.mark.parametrize(
    ("model", "config"),
    [pytest.param(model, config, marks=marks((model, config), LONG, SLOW)) for model in MODELS for config in CONFIGS],
)
def test_no_tensor_of_a_forward_pass_stays_on_the_cpu(model: str, config: str) -> None:
    rewritten, case = _rewritten(model, CONFIGS[config])
    with FakeTensorMode(allow_non_fake_inputs=True):
        move(rewritten, lambda x: torch.empty_like(x, device="cuda"))
        args, kwargs = case.on(lambda x: torch.empty_like(x, device="cuda"))
        loss = Engine(rewritten).loss(_loss(rewritten(*args, **kwargs)))
        assert loss.device.type == "cuda"
        assert rewritten.cost.cp.device.type == "cuda"


@pytest.mark.parametrize("config", thinned(["fractrain", "static", "pfq"], 3))
def test_a_step_runs_on_the_meta_device(config: str) -> None:
    rewritten, case = _rewritten("resnet10t", CONFIGS[config])
    rewritten.to("meta")
    args, _ = case.on(lambda x: x.to("meta"))
    Engine(rewritten).loss(_loss(rewritten(*args))).backward()
    assert all(each.grad is not None and each.grad.is_meta for each in rewritten.parameters())


@pytest.mark.parametrize(
    ("model", "config", "skipping"),
    [
        pytest.param(model, config, name, marks=marks((model, config), LONG, SLOW))
        for model in MODELS
        for config in CONFIGS
        for name in SKIPPING
        if _changes(config, name)
    ],
)
def test_an_epoch_on_another_device_gives_the_cpus_numbers(model: str, config: str, skipping: Any) -> None:
    rewritten, case = _rewritten(model, CONFIGS[config] | {"run": RunConfig(skipping=skipping)})
    args, kwargs = case.on(Tensor.clone)
    expected = float(_loss(copy.deepcopy(rewritten)(*args, **kwargs)).detach())
    with Elsewhere():
        put_elsewhere(rewritten)
        engine = Engine(rewritten)
        args, kwargs = case.on(lambda x: x.to(ELSEWHERE))
        found = _loss(rewritten(*args, **kwargs))
        loss = engine.loss(found)
        loss.backward()
        places = {each.device for each in (loss, rewritten.cost.cp, *_gradients(rewritten))}
        engine.end_epoch()
        evaluated = _loss(rewritten.eval()(*args, **kwargs))
        assert places | {evaluated.device} == {ELSEWHERE}
        assert bool(evaluated.isfinite())
    # The CPU rounds with other code than devices do, and a value between two levels may go to either.
    assert abs(float(found.detach()) - expected) <= 0.02 * abs(expected)


def test_a_tensor_left_on_the_cpu_is_found() -> None:
    with Elsewhere():
        x = torch.ones(3, device=ELSEWHERE)
        assert float((x * torch.tensor(2.0)).sum()) == 6  # a GPU takes a number of the CPU too
        with pytest.raises(RuntimeError, match=r"a tensor of shape \(3,\) was left on the CPU"):
            x + torch.ones(3)


def _rewritten(model: str, config: dict[str, Any]) -> tuple[FracModel, Case]:
    case = MODELS[model]()
    for module in case.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # two passes over the same values are compared
    return rewritten(case, config=paper(**config)).train(), case


def _loss(output: Any) -> Tensor:
    loss: Tensor = output.square().mean() if isinstance(output, Tensor) else output.loss
    return loss


def _gradients(model: FracModel) -> list[Tensor]:
    missing = [name for name, each in model.named_parameters() if each.requires_grad and each.grad is None]
    assert not missing
    return [each.grad for each in model.parameters() if each.grad is not None]
