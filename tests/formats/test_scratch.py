"""Memory that ops use again: in the order that is asked for, and good in every mode of autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fractrain_fx import Engine, FracConfig, RunConfig, fractrainify
from fractrain_fx.config import Backend
from fractrain_fx.formats.scratch import Order, scratch
from tests.residual import Residual


def _given(like: Tensor, slot: int = 7, order: Order = "kept") -> Tensor:
    found = scratch(like, slot, order)
    assert found is not None and found.shape == like.shape
    return found


def test_it_is_the_same_memory_for_whatever_is_no_larger() -> None:
    large = _given(torch.empty(4, 6))
    assert _given(torch.empty(4, 6)) is large
    assert _given(torch.empty(3, 5)).data_ptr() == large.data_ptr()
    assert _given(torch.empty(4, 6), slot=8).data_ptr() != large.data_ptr()
    assert _given(torch.empty(4, 6, dtype=torch.float64)).dtype == torch.float64
    grown = _given(torch.empty(50, 60))
    again = _given(torch.empty(4, 6))
    assert again.data_ptr() == grown.data_ptr(), "no view of what was given back"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_types_are_computed_in_float32(dtype: torch.dtype) -> None:
    assert _given(torch.empty(4, 6, dtype=dtype)).dtype == torch.float32


def test_the_order_of_dimensions_is_that_of_the_values_or_the_one_asked_for() -> None:
    heads = torch.empty(2, 5, 3, 4).transpose(1, 2)
    assert _given(heads).stride() == heads.stride()
    assert _given(heads, order="matrices").is_contiguous()
    assert _given(heads.mT, order="matrices").mT.is_contiguous()
    every_second = torch.empty(4, 6)[:, ::2]
    images = torch.empty(2, 3, 4, 5)
    turned = images.contiguous(memory_format=torch.channels_last)
    for each in (images, turned):
        assert _given(each, order="channels last").is_contiguous(memory_format=torch.channels_last)
        assert _given(each, order="plain").is_contiguous()
    assert scratch(every_second, 7) is None and _given(every_second, order="matrices").is_contiguous()


def test_none_is_kept_for_nothing_and_for_what_is_very_large() -> None:
    assert scratch(torch.empty(0, 3), 7) is None
    assert scratch(torch.empty(1).expand((1 << 24) + 1), 7) is None
    assert scratch(torch.empty(3, device="meta"), 7) is None


@pytest.mark.parametrize("backend", ["plain", "cpu"])
def test_training_goes_on_after_larger_batches_in_inference_mode(backend: Backend) -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 6)
    config = FracConfig(method="pfq", run=RunConfig(backend=backend))
    model = fractrainify(Residual(), config=config, example_inputs=(x[:2],), check=False).train()
    engine = Engine(model)
    engine.loss(model(x[:8]).square().mean()).backward()
    with torch.inference_mode():
        model.eval()(x)
    engine.loss(model.train()(x).square().mean()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
