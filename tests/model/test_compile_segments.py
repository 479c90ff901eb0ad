"""Segments compiled one by one give what the model gives, and equal segments are compiled once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from fractrain_fx import FracConfig, FracModel, Precision, fractrainify
from fractrain_fx.errors import ConfigError
from tests.models import build
from tests.passes.execute.test_segments import IMAGES, Residual, rewritten


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def small(method: str, **settings: Any) -> tuple[FracModel, torch.Tensor]:
    case = build("multihead_attention")
    config = FracConfig(method=method, **settings)  # type: ignore[arg-type]
    return fractrainify(case.model, config=config, example_inputs=case.args), torch.randn(4, 5, 12)


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of a step whose noise depends on the seed alone."""
    torch.manual_seed(0)
    y = model(x)
    y.square().mean().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return [y.detach(), *gradients]


@pytest.mark.parametrize("method", [pytest.param("float", marks=pytest.mark.long), "pfq"])
def test_each_segment_is_one_graph_and_a_new_precision_compiles_none_anew(method: str) -> None:
    model, x = small(method)
    segments = len(model._state.running[True].segments())
    counter = CompileCounterWithBackend("aot_eager")
    model.compile_segments(fullgraph=True, backend=counter)
    before = step(model, x)[0]
    assert counter.frame_count == segments > 1
    if method == "pfq":
        model.set_precision(Precision(2, 4))
        assert not torch.equal(step(model, x)[0], before)
    assert counter.frame_count == segments


@pytest.mark.long
def test_compiled_segments_and_eager_mode_agree() -> None:
    # Not at few bits, where a value that rounds the other way is far off.
    model, x = rewritten(Residual(), IMAGES, method="static", precision="FW-16/BW-16").train(), IMAGES
    eager = step(model, x)
    model.compile_segments(fullgraph=True, backend="aot_eager")
    for a, b in zip(step(model, x), eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)  # sums and noise differ


@pytest.mark.long
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
    plain = fractrainify(build("multihead_attention").model, config=FracConfig(method="pfq"), example_inputs=(x,))
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


@pytest.mark.long
def test_equal_segments_come_from_the_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=6, num_heads=2)
    model = fractrainify(vit, config=FracConfig(method="pfq"), example_inputs=(torch.randn(2, 3, 32, 32),))
    model.compile_segments(fullgraph=True)
    counters.clear()
    step(model, torch.randn(2, 3, 32, 32))
    segments = len(model._state.running[True].segments())
    assert counters["inductor"]["fxgraph_cache_hit"] >= segments
