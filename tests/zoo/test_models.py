"""The paper's models: their MACs are the ones its costs follow from (ALGORITHM 7), their shapes and sizes known."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fractrain_fx.zoo import models
from tests.models import some_long

IMAGE = (1, 3, 32, 32)


@functools.cache
def transformer_base() -> models.TransformerLM:
    return models.transformer_base(50).eval()


def macs(model: nn.Module, x: torch.Tensor) -> int:
    # Older versions of torch do not count a CPU's fused attention; plain products they all count.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.eval()(x)
    return int(counter.get_total_flops()) // 2


@pytest.mark.parametrize(
    ("name", "millions"),
    [("resnet38", 83.28), ("resnet74", 168.22), ("resnet110", 253.15), ("resnet164", 247.65), ("mobilenetv2", 91.15)],
)
def test_macs_are_those_of_the_table(name: str, millions: float) -> None:
    with torch.device("meta"):
        counted = macs(getattr(models, name)(), torch.zeros(IMAGE))
    # the table prints two decimals, some of them cut off
    assert counted / 1e6 == pytest.approx(millions, abs=0.006)


@pytest.mark.parametrize(("name", "blocks"), [("resnet38", 6), ("resnet74", 12), ("resnet110", 18)])
def test_basic_resnets_have_the_parameters_that_their_widths_give(name: str, blocks: int) -> None:
    def block(inputs: int, width: int) -> int:
        projection = 0 if inputs == width else inputs * width + 2 * width
        return 9 * inputs * width + 9 * width * width + 4 * width + projection

    expected = 27 * 16 + 2 * 16 + 64 * 10 + 10
    for inputs, width in ((16, 16), (16, 32), (32, 64)):
        expected += block(inputs, width) + (blocks - 1) * block(width, width)
    assert sum(p.numel() for p in getattr(models, name)().parameters()) == expected


@pytest.mark.parametrize(
    ("name", "depth"), [("resnet38", 38), ("resnet74", 74), ("resnet110", 110), ("resnet164", 164)]
)
def test_the_name_counts_the_layers_outside_the_projections(name: str, depth: int) -> None:
    layers = [
        path
        for path, module in getattr(models, name)().named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear) and "downsample" not in path
    ]
    assert len(layers) == depth


def test_mobilenetv2_keeps_the_resolution_in_stem_and_second_stage() -> None:
    sizes: list[int] = []
    model = models.mobilenetv2().eval()
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, out: sizes.append(out.shape[-1]))
    model(torch.zeros(IMAGE))
    assert sizes == [32] * 3 + [16] * 3 + [8] * 7 + [4] * 4


@pytest.mark.parametrize("name", some_long(["resnet38", "resnet164", "mobilenetv2"], "resnet164"))
def test_image_models_train_with_as_many_classes_as_asked_for(name: str) -> None:
    model = getattr(models, name)(num_classes=7)
    logits = model(torch.randn(2, *IMAGE[1:]))
    assert logits.shape == (2, 7)
    logits.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_transformer_base_has_the_macs_and_parameters_of_its_widths() -> None:
    vocab, length = 50, 8
    model = transformer_base()
    linears = 6 * (4 * 512 * 512 + 2 * 512 * 2048)
    assert linears / 1e6 == pytest.approx(18.87, abs=0.005)
    attention = 6 * 2 * 512 * length  # QK and AV, a token
    assert macs(model, torch.zeros(1, length, dtype=torch.long)) == length * (linears + attention + 512 * vocab)
    assert sum(p.numel() for p in model.parameters()) == linears + 6 * (5 * 512 + 2048 + 4 * 512) + 1024 + 512 * vocab


def test_transformer_ties_its_head_to_the_embedding() -> None:
    assert transformer_base().head.weight is transformer_base().embed.weight


def test_transformer_sees_only_the_past_and_knows_the_order() -> None:
    model = transformer_base()
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    changed = torch.tensor([[1, 2, 3, 4, 9, 6]])
    swapped = torch.tensor([[2, 1, 3, 4, 5, 6]])
    with torch.no_grad():
        logits = model(tokens)
        # 1e-5: float32 over six layers, where nothing but the summation order may differ
        torch.testing.assert_close(model(changed)[:, :4], logits[:, :4], atol=1e-5, rtol=0)
        assert not torch.allclose(model(changed)[:, 5], logits[:, 5], atol=1e-3)
        assert not torch.allclose(model(swapped)[:, 5], logits[:, 5], atol=1e-3)


def test_transformer_takes_any_length() -> None:
    model = models.TransformerLM(11, width=16, hidden=32, layers=1, heads=2)
    assert model(torch.zeros(2, 700, dtype=torch.long)).shape == (2, 700, 11)
