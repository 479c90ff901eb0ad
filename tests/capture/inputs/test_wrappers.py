"""What others put around a model is taken off, or refused; adapters stay and train."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import peft
import pytest
import timm
import torch
import transformers
from torch import Tensor, distributed, nn

from fractrain_fx import Engine, FracConfig, FracModel, fractrainify, plan
from fractrain_fx.capture.inputs.wrappers import unwrapped
from fractrain_fx.errors import CaptureError, ModelError
from tests.models import Case, build, thinned


@pytest.fixture
def one_process() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def in_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def prepared(model: nn.Module) -> nn.Module:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    wrapped: nn.Module = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    AcceleratorState._reset_state(True)
    return wrapped


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (in_ddp, "DistributedDataParallel"),
        (nn.DataParallel, "DataParallel"),
        (torch.compile, "OptimizedModule"),
        (prepared, "mixed precision"),
        (lambda model: torch.compile(in_ddp(model)), "OptimizedModule around DistributedDataParallel"),
    ],
)
@pytest.mark.usefixtures("one_process")
def test_a_wrapper_is_taken_off_with_a_warning(
    wrap: Callable[[nn.Module], nn.Module], name: str, tmp_path: Any
) -> None:
    case = build("tied_weights")
    expected = plan(case.model, example_inputs=case.args).to_dict()
    wrapped = wrap(case.model)
    with pytest.warns(UserWarning, match=rf"{name} was taken off TiedWeights: wrap .* the rewritten model instead"):
        model = fractrainify(wrapped, example_inputs=case.args)
    assert model.restore() is case.model
    assert "forward" not in vars(case.model)
    assert model(*case.args).dtype == torch.float32
    assert model.macs == expected["macs"]
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = FracModel.from_pretrained(tmp_path, model=wrap(build("tied_weights").model))
    assert again.state_dict().keys() == model.state_dict().keys()


def test_a_model_without_wrapper_is_handed_back_without_a_word() -> None:
    model = build("tied_weights").model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert unwrapped(model) is model


@pytest.mark.usefixtures("one_process")
def test_a_sharded_model_is_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(CaptureError, match="call fractrainify first"):
        fractrainify(model, example_inputs=(torch.randn(2, 4),))


def test_lazy_parameters_have_to_be_fixed_first() -> None:
    with pytest.raises(CaptureError, match="run it once"):
        fractrainify(nn.Sequential(nn.LazyLinear(4)), example_inputs=(torch.randn(2, 4),))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2
    )
    lora = peft.LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True, lora_dropout=0.1)
    return peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora)


def bert() -> nn.Module:
    lora = peft.LoraConfig(r=4, target_modules=["query", "value"], task_type="SEQ_CLS")
    return peft.get_peft_model(build("bert").model, lora)


def vit() -> nn.Module:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=4)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["qkv"], modules_to_save=["head"]))


@pytest.mark.parametrize("make", thinned([gpt2, bert, vit], 3))
def test_adapters_train_and_what_is_frozen_costs_no_gradient(make: Callable[[], nn.Module], tmp_path: Any) -> None:
    adapted = make()
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    model = fractrainify(adapted)
    for op in model.ops:
        own = any(name.startswith(f"{op.name}.") for name in trained)
        assert op.kind == "matmul" or op.training_macs[2] == (op.macs if own else 0), op.name
    # The adapter's sum is no residual block of its own: attention and MLP of each layer are.
    assert [block.skip for block in model.blocks].count("identity") == 4
    assert not any(block.skip == "projection" for block in model.blocks)

    inputs = model._state.recording
    engine = Engine(model)
    output = model(*inputs.args, **inputs.kwargs)
    logits = output if isinstance(output, Tensor) else output.logits
    engine.loss(logits.square().mean()).backward()
    learned = {name for name, p in model.named_parameters() if p.grad is not None and not name.startswith("frac.")}
    assert learned == trained
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)

    model.save_pretrained(tmp_path)
    rebuilt = FracModel.from_pretrained(tmp_path, model=make())
    assert {name for name, p in rebuilt.named_parameters() if p.requires_grad and name in trained} == trained
    assert all(torch.equal(p, rebuilt.state_dict()[name]) for name, p in model.state_dict().items())
    assert isinstance(model.restore(), peft.PeftModel)


def test_adapters_that_come_after_rewriting_are_told_to_come_before() -> None:
    case: Case = build("bert")
    model = fractrainify(case.model, config=FracConfig(method="float"), example_kwargs=case.keywords)
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["query"]))
    with pytest.raises(
        ModelError, match=r"query' was Linear.*is PEFT's Linear.*unload\(\).*fractrainify\(get_peft_model\(plain"
    ):
        adapted(**case.keywords)
    adapted.unload()
    assert fractrainify(peft.get_peft_model(model.restore(), peft.LoraConfig(target_modules=["query"]))).ops
    head = peft.LoraConfig(r=4, target_modules=["query"], modules_to_save=["classifier"])
    with pytest.raises(ModelError, match=r"replace classifier.*fractrainify\(get_peft_model\(plain"):
        peft.get_peft_model(fractrainify(build("bert").model, example_kwargs=case.keywords), head)


def test_the_adapter_alone_is_saved_from_the_restored_model(tmp_path: Any) -> None:
    case: Case = build("bert")
    lora = peft.LoraConfig(r=4, target_modules=["query"], task_type="SEQ_CLS")
    model = fractrainify(peft.get_peft_model(case.model, lora), example_kwargs=case.keywords)
    restored: Any = model.restore()
    restored.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()
