"""Segments compiled one by one give what the model gives, and equal segments are compiled once."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from fractrain_fx import FracConfig, FracModel, Precision, RunConfig, fractrainify
from fractrain_fx.errors import ConfigError
from fractrain_fx.passes import fused_ops
from fractrain_fx.passes.execute.shared_code import SharedCode
from tests.build import paper
from tests.build import rewritten as build_rewritten
from tests.models import COMPILES_EXPERTS, build
from tests.segmented import IMAGES, ROWS, Residual, rewritten


def small(method: str, **settings: Any) -> tuple[FracModel, torch.Tensor]:
    case = build("multihead_attention")
    return build_rewritten(case, config=paper(method, **settings)), torch.randn(4, 5, 12)


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of a step whose noise depends on the seed alone."""
    torch.manual_seed(0)
    y = model(x)
    y.square().mean().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return [y.detach(), *gradients]


@pytest.mark.long
def test_a_new_precision_compiles_nothing_anew() -> None:
    model, x = small("pfq")
    counter = CompileCounterWithBackend("aot_eager")
    model.compile_segments(fullgraph=True, backend=counter)
    before, compiled = step(model, x)[0], counter.frame_count
    assert 1 < compiled <= len(model._state.running[True].segments())
    model.set_precision(Precision(2, 4))
    assert not torch.equal(step(model, x)[0], before)
    assert counter.frame_count == compiled


class Layers(nn.Module):
    """Equal residual layers, but for dropout, which differs in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.5 if layer == 4 else 0.0))
            for layer in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.long
def test_equal_segments_are_compiled_once_and_give_what_each_alone_gives() -> None:
    model = rewritten(Layers(), ROWS, method="static", precision="FW-16/BW-16").train()
    plain = step(model, ROWS)
    segments = model._state.running[True].segments()
    shared = SharedCode()
    kinds = Counter(type(shared.of(each)) for each in segments)
    assert max(kinds.values()) >= 3 and len(kinds) >= 3  # the layers, the one with more dropout, the first or the last
    counter = CompileCounterWithBackend("eager")
    model.compile_segments(fullgraph=True, backend=counter)
    for a, b in zip(step(model, ROWS), plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)  # other noise of rounding
    assert counter.frame_count == len(kinds)


@pytest.mark.long
def test_segments_on_codes_are_compiled_once_too_and_each_op_chooses_for_itself() -> None:
    words = {"method": "static", "precision": "FW-8/BW-16"}
    model = rewritten(Layers(), ROWS, run=RunConfig(backend="codes-always"), **words).train()
    plain = step(model, ROWS)
    shared = SharedCode()
    kinds = Counter(type(shared.of(each)) for each in model._state.running[True].segments())
    assert max(kinds.values()) >= 3
    for op in fused_ops(model._state.running[True].current()).values():
        assert op.codes is not None
        op.codes.kernel = "not yet timed"
    counter = CompileCounterWithBackend("aot_eager")
    model.compile_segments(fullgraph=True, backend=counter)
    for a, b in zip(step(model, ROWS), plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)  # other noise of rounding
    assert set(model.kernels().values()) == {"int8"}
    assert counter.frame_count == len(kinds)


@pytest.mark.long
def test_compiled_segments_and_eager_mode_agree() -> None:
    # Not at few bits, where a value that rounds the other way is far off.
    model, x = rewritten(Residual(), IMAGES, method="static", precision="FW-16/BW-16").train(), IMAGES
    eager = step(model, x)
    model.compile_segments(fullgraph=True, backend="aot_eager")
    for a, b in zip(step(model, x), eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)  # sums and noise differ


@pytest.mark.slow
def test_checkpointed_segments_are_compiled_too() -> None:
    model, x = small("fractrain")
    model.compile_segments(backend="aot_eager")
    kept = step(model, x)
    model.gradient_checkpointing_enable()
    for a, b in zip(step(model, x), kept, strict=True):
        assert torch.equal(a, b)


@pytest.mark.long
def test_evaluation_and_other_sizes_run_compiled_segments() -> None:
    model, x = small("pfq")
    step(model, x)  # ranges
    counter = CompileCounterWithBackend("aot_eager")
    model.compile_segments(backend=counter)
    plain = fractrainify(
        build("multihead_attention").model, config=FracConfig(method="pfq"), example_inputs=(x,), check=False
    )
    plain.load_state_dict(model.state_dict())
    model.eval(), plain.eval()
    with torch.no_grad():
        for batch in (x, torch.randn(7, 5, 12), torch.randn(4, 6, 12)):
            torch.testing.assert_close(model(batch), plain(batch), rtol=1e-5, atol=1e-6)
    assert counter.frame_count


@pytest.mark.long
def test_a_copy_compiles_its_own_segments() -> None:
    model, x = small("pfq")
    model.compile_segments(backend="aot_eager")
    for a, b in zip(step(copy.deepcopy(model), x), step(model, x), strict=True):
        assert torch.equal(a, b)


def test_an_unknown_option_is_an_error() -> None:
    model, _ = small("pfq")
    with pytest.raises(ConfigError, match=r"torch.compile has no option 'full_graph'.*Did you mean 'fullgraph'"):
        model.compile_segments(full_graph=True)


_COMPILED = [pytest.param("resnet18", marks=pytest.mark.slow), "gpt2", *(["mixtral"] if COMPILES_EXPERTS else [])]


@pytest.mark.long
@pytest.mark.parametrize("name", _COMPILED)
def test_torch_finds_no_other_difference_between_segments_of_one_function(name: str) -> None:
    case = build(name)
    model = fractrainify(case.model, example_inputs=case.args, example_kwargs=case.keywords, check=False).train()
    shared = SharedCode()
    kinds = {type(shared.of(each)) for each in model._state.running[True].segments()}
    counter = CompileCounterWithBackend("eager")
    model.compile_segments(backend=counter)
    model(*case.args, **case.keywords)
    assert counter.frame_count <= len(kinds)
