"""Parts and calls of other tools: TorchScript, checkpointing that was on before, merged adapters, tracers."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn

from fractrain_fx import FracConfig, fractrainify, summarize
from fractrain_fx.errors import ModelError
from fractrain_fx.passes import ops_of

FLOAT = FracConfig(method="float")


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


class Holder(nn.Module):
    def __init__(self, part: Any) -> None:
        super().__init__()
        self.first, self.part, self.middle, self.last = nn.Linear(6, 6), part, nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.part(self.first(x))))


@pytest.mark.parametrize("make", [torch.jit.script, lambda part: torch.jit.trace(part, torch.randn(4, 6))])
def test_a_part_in_torchscript_is_one_node_and_stays_float(make: Any) -> None:
    model, x = Holder(make(Part())), torch.randn(4, 6)
    rewritten = fractrainify(model, config=FracConfig(method="pfq"), example_inputs=(x,))
    (op,) = [op for _, op in ops_of(rewritten.graph) if op.module == "part"]
    assert "TorchScript" in op.precision.reason and "part" in str(summarize(rewritten))
    rewritten(x).sum().backward()
    assert dict(rewritten.named_parameters())["part.linear.weight"].grad is not None
    plain = rewritten.restore()
    again = fractrainify(plain, config=FLOAT, example_inputs=(x,))
    for mode in (True, False):
        again.train(mode)
        assert torch.equal(again(x), plain(x))


@pytest.mark.parametrize("kind", ["resnet", "vit", "densenet"])
def test_checkpointing_that_was_on_before_is_off_while_recording_and_on_again_afterwards(kind: str) -> None:
    model: Any
    plain: nn.Module
    if kind == "densenet":
        densenet = torchvision.models.DenseNet(8, (2, 2), 8, memory_efficient=True, num_classes=4)
        model, plain = densenet, torchvision.models.DenseNet(8, (2, 2), 8, num_classes=4)
    else:
        options: dict[str, Any] = {
            "resnet": {"model_name": "resnet10t"},
            "vit": {"model_name": "vit_tiny_patch16_224", "img_size": 32, "depth": 2},
        }
        model, plain = (timm.create_model(num_classes=4, **options[kind]) for _ in "ab")
        model.set_grad_checkpointing(True)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(4, 3, 32, 32)
    rewritten = fractrainify(model, config=FLOAT, example_inputs=(x,), check=False)
    assert rewritten.is_gradient_checkpointing
    for each in (rewritten, plain):
        each(x).square().sum().backward()
    for name, p in plain.named_parameters():
        ours = rewritten.get_parameter(name).grad
        assert p.grad is not None and ours is not None and torch.equal(ours, p.grad), name
    assert all(torch.equal(b, rewritten.state_dict()[name]) for name, b in plain.named_buffers())


def test_checkpointing_that_was_on_before_and_can_not_be_on_again_is_a_warning() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=False)

    with pytest.warns(UserWarning, match=r"was set to checkpoint activations, and they are kept.*one segment"):
        rewritten = fractrainify(Checkpointed(), config=FLOAT, example_inputs=(torch.randn(4, 6),))
    assert not rewritten.is_gradient_checkpointing


def test_adapters_that_are_merged_after_the_rewrite_do_not_count_twice() -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
    base = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    lora = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    ids = torch.randint(64, (2, 12))
    call = {"input_ids": ids, "labels": ids}
    rewritten = fractrainify(peft.get_peft_model(base, lora), config=FLOAT, example_kwargs=call).eval()
    loss = rewritten(**call).loss
    with pytest.raises(ModelError, match=r"c_attn.*count twice.*unmerge_adapter.*restore"):
        rewritten.merge_adapter()
        rewritten(**call)
    rewritten.unmerge_adapter()
    torch.testing.assert_close(rewritten(**call).loss, loss)


@pytest.mark.parametrize(
    "transform",
    [
        lambda model, x: torch.jit.trace(model, x),
        lambda model, x: torch.func.jacrev(model)(x),
        lambda model, x: torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(
            dict(model.named_parameters())
        ),
    ],
)
def test_tracers_and_transforms_say_what_to_do(transform: Any) -> None:
    model, x = Holder(Part()), torch.randn(4, 6)
    rewritten = fractrainify(copy.deepcopy(model), config=FracConfig(method="pfq"), example_inputs=(x,))
    rewritten(x)
    rewritten.eval()
    with pytest.raises(ModelError, match=r"torch.jit.trace.*model.restore\(\).*loss.backward\(\)"):
        transform(rewritten, x)
    plain = fractrainify(model, config=FLOAT, example_inputs=(x,)).eval()
    plain(x)
    transform(plain, x)
