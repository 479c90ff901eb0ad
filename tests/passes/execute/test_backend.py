"""Models whose ops run on integer codes train as in the simulation, and every op says how it multiplies."""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fractrain_fx import Engine, FracModel, Pin, Precision, RunConfig, plan, summarize
from fractrain_fx.config import Method
from fractrain_fx.execution.codes import timing
from fractrain_fx.passes import not_on_int8
from tests.build import paper, rewritten
from tests.products import needs_kernels

pytestmark = needs_kernels


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.wide(self.norm(x)).relu())


class _Net(nn.Module):
    """Residual blocks of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, 24), nn.Linear(24, 10)
        self.layers = nn.Sequential(_Block(24), _Block(24))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.stem(x)))


class _Mixed(nn.Module):
    """Contractions of all kinds, most of which have no form on integers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.point, self.patch = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 2, stride=2)
        self.spatial, self.grouped = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1, groups=2)
        self.strided = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))
        self.several = nn.Parameter(torch.randn(2, 8, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.spatial(self.patch(self.point(self.stem(x).relu()).relu()).relu()).relu()
        x = self.grouped(self.strided(x).relu())
        x = x.flatten(2).mT.relu()
        x = x @ (x.mT @ x)
        x = (x.unsqueeze(1) @ self.several).mean((1, 2))
        return self.head(torch.addmm(self.bias, torch.addmm(self.bias, x, self.weight), self.weight, alpha=2))


def _made(model: nn.Module | None = None, inputs: Tensor | None = None, **options: Any) -> FracModel:
    """A rewritten model, whose kernels multiply codes unless the options say otherwise."""
    options = {"run": RunConfig(backend="cpu")} | options
    torch.manual_seed(0)
    inputs = torch.randn(4, 64) if inputs is None else inputs
    return rewritten(model or _Net(), inputs, config=paper(**options))


def _trained(steps: int = 12, **options: Any) -> tuple[FracModel, list[float], list[Tensor]]:
    """Losses and choices of a few steps on digits-like values."""
    model = _made(**options)
    engine, optimizer = Engine(model), torch.optim.SGD(model.parameters(), lr=0.02)
    torch.manual_seed(1)
    x = torch.rand(64, 64)
    y = (x[:, :32].sum(1) - x[:, 32:].sum(1)).mul(2).round().long() % 10
    losses, choices = [], []
    for step in range(steps):
        part = slice(step % 2 * 32, step % 2 * 32 + 32)
        loss = engine.loss(nn.functional.cross_entropy(model(x[part]), y[part]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        choices += [each.detach().argmax(1) for each in model.cost.choice.values()]
    return model, losses, choices


@pytest.mark.parametrize(
    ("options", "skipping"),
    [
        ({"method": "pfq"}, "computed"),
        ({"method": "static", "precision": Precision(8, 16)}, "computed"),
        ({"method": "fractrain"}, "computed"),
        ({"method": "fractrain"}, 0.0),
    ],
)
def test_training_gives_the_losses_and_choices_of_the_simulation(options: dict[str, Any], skipping: Any) -> None:
    _, wanted, picked = _trained(**options, run=RunConfig(backend="cpu", skipping=skipping))
    model, losses, choices = _trained(**options, run=RunConfig(backend="codes-always", skipping=skipping))
    assert set(model.kernels().values()) == {"int8"} and len(model.kernels()) == 4
    assert losses[0] == pytest.approx(wanted[0], rel=1e-6)
    # A sum in another order may move a value across the middle of two levels, by one of up to 8.
    assert losses == pytest.approx(wanted, rel=1e-2)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(choices, picked, strict=True))
    model.eval()
    with torch.no_grad():
        assert model(torch.randn(3, 64)).isfinite().all()


def test_every_quantized_op_says_why_it_has_no_form_on_integers() -> None:
    inputs = torch.randn(2, 3, 8, 8)
    model = _made(_Mixed(), inputs, method="pfq", run=RunConfig(backend="codes-always"))
    reasons = not_on_int8(model.graph_module, model.frac_config)
    assert reasons["grouped"] == "convolves groups of channels"
    assert sum(reason == "multiplies two activations" for reason in reasons.values()) == 2
    assert "multiplies by a batch of matrices" in reasons.values()
    assert "scales its product or its added term" in reasons.values()
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    kernels = model.kernels()
    assert [name for name, kernel in kernels.items() if kernel == "int8"] == [n for n in kernels if n not in reasons]
    assert {name: kernels[name] for name in reasons} == reasons
    shown = str(summarize(model))
    assert "5 of 10 quantized ops may multiply on int8" in shown and "convolves groups of channels" in shown
    drafted = plan(_Mixed(), config=model.frac_config, example_inputs=(torch.randn(2, 3, 8, 8),))
    assert "5 of 10 quantized ops may multiply on int8" in str(drafted)


def test_bits_that_have_no_codes_are_a_reason() -> None:
    wide: dict[str, Any] = {
        "pins": (Pin("layers.0.wide", Precision(12, 12)),),
        "run": RunConfig(backend="codes-always"),
    }
    model = _made(method="pfq", **wide)
    assert not_on_int8(model.graph_module, model.frac_config) == {
        "layers.0.wide": "its weight has 12 bits, more than 8"
    }
    model = _made(method="pfq", stages="FW(4,12)/BW(6,12)", run=RunConfig(backend="codes-always"))
    assert not not_on_int8(model.graph_module, model.frac_config)
    model(torch.randn(4, 64)).sum().backward()
    assert set(model.kernels().values()) == {"int8"}
    model.set_precision(Precision(12, 12))
    model(torch.randn(4, 64)).sum().backward()
    assert set(model.kernels().values()) == {"operands of 12 and 12 bits have no 8-bit codes"}


def test_an_op_in_a_format_without_codes_says_so() -> None:
    pins = (Pin("layers.0.wide", "8/8", format="fp8"),)
    model = _made(method="pfq", pins=pins, run=RunConfig(backend="codes-always"))
    reasons = {"layers.0.wide": "its format has no codes"}
    assert not_on_int8(model.graph_module, model.frac_config) == reasons
    assert "3 of 4 quantized ops may multiply on int8" in str(summarize(model))
    model(torch.randn(4, 64)).sum().backward()
    assert model.kernels() == {**dict.fromkeys(model.kernels(), "int8"), **reasons}
    assert model.backends()["layers.0.wide"][:2] == ("plain", {"codes": "its format has no codes"})


def test_a_weight_in_front_of_an_activation_is_the_reason() -> None:
    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(16, 8), nn.Linear(8, 4)
            self.weight = nn.Parameter(torch.randn(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            return self.head((self.weight @ self.stem(x)).relu())

    model = _made(Projected(), torch.randn(3, 6, 16), method="pfq", run=RunConfig(backend="codes-always"))
    assert set(not_on_int8(model.graph_module, model.frac_config).values()) == {"its first factor is the weight"}


def test_without_units_for_codes_all_stays_float_and_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "kernels", lambda: SimpleNamespace(has_products=lambda: False))
    x = torch.randn(4, 64)
    model, simulated = _made(method="pfq", run=RunConfig(backend="codes")), _made(method="pfq")
    assert set(model.kernels().values()) == {"not yet timed"} and set(simulated.kernels().values()) == {"float"}
    with caplog.at_level(logging.WARNING):
        assert torch.equal(*(_seeded(each, x) for each in (model, simulated)))
    reason = "the C++ kernels multiply codes by AVX2, which this CPU lacks"
    assert len(caplog.messages) == 1 and reason in caplog.messages[0]
    assert set(model.kernels().values()) == {reason}
    assert f"but not here: {reason}" in " ".join(str(summarize(model)).split())


def test_kernels_multiply_without_units_for_bytes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "_int_mm", None)
    model = _made(method="pfq", run=RunConfig(backend="codes"))
    assert "but not here" not in str(summarize(model))
    with caplog.at_level(logging.WARNING):
        model(torch.randn(4, 64)).sum().backward()
    assert not caplog.messages and _timed(model) == set(model.kernels().values())


def test_the_form_is_timed_in_the_first_training_step_only() -> None:
    model, x = _made(method="static", run=RunConfig(backend="codes")), torch.randn(8, 64)
    tuner = _tuner(model)
    model(x).sum().backward()
    # Blocks are alike; the two layers of one are not.
    assert len(tuner.timings) == 2 and set(model.kernels().values()) <= {"float", "int8"}
    first = dict(tuner.timings)
    model(x[:7]).sum().backward()
    model.eval()
    with torch.no_grad():
        model(x)
    assert tuner.timings == first
    assert _timed(model) == set(model.kernels().values())


def test_other_widths_are_timed_anew() -> None:
    """The kernels take less time for fewer bits."""
    model = _made(method="pfq", run=RunConfig(backend="codes"))
    for precision in (Precision(3, 6), Precision(8, 8), Precision(3, 6)):
        model.set_precision(precision)
        model(torch.randn(8, 64)).sum().backward()
    assert len(_tuner(model).timings) == 4


def _timed(model: FracModel) -> set[str]:
    """What the timings of a model say."""
    return {"int8" if timing.int8 else "float" for timing in _tuner(model).timings.values()}


def _tuner(model: FracModel) -> Any:
    codes = model._state.running[True].fused["layers.0.wide"].codes
    assert codes is not None
    return codes.tuner


def _seeded(model: Any, x: Tensor) -> Tensor:
    """The gradient of a weight, from fixed noise."""
    torch.manual_seed(2)
    model.zero_grad()
    model(x).square().sum().backward()
    return model.get_parameter("layers.0.wide.weight").grad.clone()


def test_a_step_that_is_computed_again_is_the_same() -> None:
    model, x = _made(method="pfq", run=RunConfig(backend="codes-always")), torch.randn(4, 64)
    wanted = _seeded(model, x)
    model.zero_grad()
    torch.manual_seed(2)
    checkpoint(model, x, use_reentrant=False).square().sum().backward()
    found = model.get_parameter("layers.0.wide.weight").grad
    assert found is not None and torch.equal(found, wanted)


@pytest.mark.parametrize("method", ["pfq", "dfq"])
def test_under_autocast_and_in_half_types_products_are_of_codes(method: Method) -> None:
    x = torch.randn(4, 64)
    model = _made(method=method, run=RunConfig(backend="codes-always"))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
        out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16 and set(model.kernels().values()) == {"int8"}
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    half = _made(method="pfq", run=RunConfig(backend="codes-always")).bfloat16()
    out = half(x.bfloat16())
    out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16 and set(half.kernels().values()) == {"int8"}
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in half.parameters())


def test_double_precision_stays_simulated() -> None:
    model, x = _made(method="pfq", run=RunConfig(backend="codes-always")).double(), torch.randn(4, 64).double()
    model(x).sum().backward()
    assert set(model.kernels().values()) == {"computes in torch.float64"}


def test_a_copy_runs_like_its_original() -> None:
    model, x = _made(method="pfq", run=RunConfig(backend="codes-always")), torch.randn(4, 64)
    wanted = _seeded(model, x)
    assert torch.equal(_seeded(copy.deepcopy(model), x), wanted)


def test_the_table_says_what_computed_each_op_and_why_quicker_backends_did_not() -> None:
    x = torch.randn(4, 64)
    coded = _made(method="pfq", run=RunConfig(backend="codes-always"))
    coded(x).sum().backward()
    assert {each.backend for each in coded.backends().values()} == {"codes"}
    coded.set_precision(Precision(16, 16))
    coded(x).sum().backward()
    backend, refused, _ = coded.backends()["layers.0.wide"]
    assert backend == "cpu" and refused == {"codes": "operands of 16 and 16 bits have no 8-bit codes"}
    coded.double()(x.double()).sum().backward()
    backend, refused, _ = coded.backends()["layers.0.wide"]
    assert backend == "plain" and refused.keys() == {"codes", "cpu", "cuda"} and "float64" in refused["codes"]
    eager = _made(method="pfq", run=RunConfig(backend="plain"))
    eager(x).sum().backward()
    assert set(map(tuple, ((each.backend, *each.refused) for each in eager.backends().values()))) == {("plain",)}
    mixed = _made(_Mixed(), torch.randn(2, 3, 8, 8), method="pfq", run=RunConfig(backend="codes-always"))
    mixed(torch.randn(2, 3, 8, 8)).sum().backward()
    assert mixed.backends()["grouped"][:2] == ("cpu", {"codes": "convolves groups of channels"})
