"""FSDP2 by segment, in one process: names, numbers, checkpoints and refusals. test_sharding_ranks.py has several."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fractrain_fx import Engine, FracModel, RunConfig
from fractrain_fx.distributed import fully_shard
from fractrain_fx.errors import ConfigError, InputError, ModelError
from tests.segmented import IMAGES, ROWS, Residual, Stack, rewritten
from tests.sharded import EncoderDecoder, PostNorm, Text, whole

WORDS = torch.arange(24).reshape(4, 6) % 11


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(model: FracModel, x: Tensor, steps: int = 3) -> list[float]:
    torch.manual_seed(5)
    engine, losses = Engine(model, epochs=30), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        loss = model(x).square().mean()
        engine.loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    engine.end_epoch()
    return losses


def held_by(group: nn.Module, model: nn.Module) -> set[str]:
    """The names of the parameters that a call of a group gathers."""
    seen: set[str] = set()

    def look(*_: Any) -> None:
        seen.update(name for name, p in model.named_parameters() if not hasattr(p, "to_local"))

    handle = group.register_forward_pre_hook(look)
    model(WORDS)
    handle.remove()
    return seen


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("model", "x", "changes"),
    [
        (Residual(), IMAGES, {"method": "float"}),
        (Residual(), IMAGES, {"run": RunConfig(skipping="left-out"), "options": ("FW-0/BW-0", "FW-4/BW-8")}),
        (Text(), WORDS, {"method": "pfq"}),
        (nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), ROWS, {"method": "static"}),
        (PostNorm(), ROWS, {"run": RunConfig(skipping="computed")}),
        (EncoderDecoder(), ROWS, {"method": "pfq"}),
        (EncoderDecoder(), ROWS, {"method": "static"}),
    ],
    ids=["float", "fractrain", "pfq", "one-op", "post-norm", "encoder-decoder", "encoder-decoder-static"],
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_sharded_model_has_the_names_and_the_numbers_of_a_whole_one(
    model: nn.Module, x: Tensor, changes: dict[str, Any], checkpointing: bool
) -> None:
    plain = rewritten(copy.deepcopy(model), x, **changes).train()
    sharded = copy.deepcopy(plain)
    if checkpointing and len(plain._state.running[True].segments()) > 1:
        sharded.gradient_checkpointing_enable()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Converting a tensor")
        assert fully_shard(sharded) is sharded and isinstance(sharded, FSDPModule)
        losses = train(sharded, x)
    assert losses == train(plain, x)
    assert [name for name, _ in sharded.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(sharded.state_dict()) == list(plain.state_dict())
    for name, value in whole(sharded).items():
        # FSDP adds up the gradients of a choice's readers inside a group first, so those of gates differ by a rounding.
        rounding = 1e-5 if name.startswith(("frac.gates.", "frac.controller.")) else 0.0
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=rounding, atol=rounding / 100)
    with torch.no_grad():
        assert torch.equal(sharded.eval()(x), plain.eval()(x))
    assert all(hasattr(p, "to_local") for p in sharded.parameters())


@pytest.mark.usefixtures("alone")
def test_a_sharded_model_costs_what_the_sizes_of_each_batch_do() -> None:
    short, longer = torch.randn(4, 3, 8), torch.randn(4, 5, 8)
    at_its_sizes, model = rewritten(PostNorm(), longer), rewritten(PostNorm(), short)
    fully_shard(model)
    for x in (short, longer):
        model(x)
    at_its_sizes(longer)
    assert float(model.cost.macs) == float(at_its_sizes.cost.macs) > model.training_macs


@pytest.mark.long
@pytest.mark.usefixtures("alone")
def test_a_sharded_model_trains_with_compiled_segments() -> None:
    plain = rewritten(Residual(), IMAGES, method="static", precision="FW-16/BW-16").train()
    sharded = copy.deepcopy(plain)
    counter = CompileCounterWithBackend("aot_eager")
    sharded.compile_segments(fullgraph=True, backend=counter)
    losses = train(fully_shard(sharded), IMAGES)
    assert losses == pytest.approx(train(plain, IMAGES), rel=1e-3)  # compiled rounding draws other noise
    assert counter.frame_count > 1


@pytest.mark.usefixtures("alone")
def test_each_segment_gathers_its_own_parameters_and_the_rest_stays_with_the_model() -> None:
    model = rewritten(Text(), WORDS, "dfq").train()
    fully_shard(model)
    model(WORDS)
    assert model._state.sharding is not None
    groups = [held_by(group, model) for group in model._state.sharding.groups]
    common = {name for name, _ in model.named_parameters() if not name.startswith("layers.")}
    assert {"embed.weight", "positions"} < common and any(name.startswith("frac.") for name in common)
    layers = [{name for name, _ in model.named_parameters() if name.startswith(f"layers.{i}.")} for i in range(3)]
    assert groups == [common | layer for layer in layers]


class Pooled(Residual):
    """Its code takes another path for large images."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.avg_pool2d(x, 2) if x.shape[-1] > 8 else x)


@pytest.mark.usefixtures("alone")
def test_recordings_made_before_run_sharded_and_later_ones_are_refused() -> None:
    large = torch.rand(2, 3, 16, 16)
    plain = rewritten(Pooled(), IMAGES, "static").train()
    fresh = copy.deepcopy(plain)
    fully_shard(fresh)
    with pytest.raises(InputError, match="before fully_shard"):
        fresh(large)
    sharded = copy.deepcopy(plain)
    for model in (plain, sharded):
        model(large)
    fully_shard(sharded)
    assert train(sharded, large) == train(plain, large)


@pytest.mark.usefixtures("alone")
def test_calibration_runs_sharded() -> None:
    plain = rewritten(Stack(), ROWS, "static")
    sharded = copy.deepcopy(plain)
    fully_shard(sharded)
    for model in (plain, sharded):
        model.calibrate([ROWS, 2 * ROWS])
        model.eval()
    assert torch.equal(plain(ROWS), sharded(ROWS))


@pytest.mark.usefixtures("alone")
def test_checkpoints_load_into_an_unsharded_model_and_back(tmp_path: Path) -> None:
    sharded, plain = (rewritten(Text(), WORDS, "dfq").train() for _ in range(2))
    fully_shard(sharded)
    train(sharded, WORDS)
    dcp.save(get_model_state_dict(sharded), checkpoint_id=tmp_path / "dcp")
    values = plain.state_dict()
    dcp.load(values, checkpoint_id=tmp_path / "dcp")
    plain.load_state_dict(values)
    assert all(torch.equal(plain.state_dict()[name], value) for name, value in whole(sharded).items())
    assert plain.head.weight is plain.embed.weight

    train(plain, WORDS)
    dcp.save(plain.state_dict(), checkpoint_id=tmp_path / "back")
    shards = get_model_state_dict(sharded)
    dcp.load(shards, checkpoint_id=tmp_path / "back")
    sharded.load_state_dict(shards)
    assert all(torch.equal(plain.state_dict()[name], value) for name, value in whole(sharded).items())

    sharded.load_state_dict(rewritten(Text(), WORDS, "dfq").state_dict())  # whole tensors, which it takes its shards of
    assert not torch.equal(whole(sharded)["embed.weight"], plain.embed.weight)
    sharded.save_pretrained(tmp_path / "saved")
    again = FracModel.from_pretrained(tmp_path / "saved", model=Text())
    assert all(torch.equal(again.state_dict()[name], value) for name, value in whole(sharded).items())


@pytest.mark.usefixtures("alone")
def test_mixed_precision_and_offload_reach_torch() -> None:
    model = rewritten(Stack(), ROWS, "dfq").train()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    fully_shard(model, mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=False))
    seen = []
    assert model._state.sharding is not None
    for group in model._state.sharding.groups:
        group.register_forward_hook(lambda *given: seen.append(given[2]))
    output, weight = model(ROWS), dict(model.named_parameters())["0.0.weight"]
    assert output.dtype == torch.float32 and weight.dtype == torch.float32
    assert {x.dtype for out in seen[:-1] for x in out if x.is_floating_point()} == {torch.bfloat16}
    Engine(model).loss(output.square().mean()).backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32


def test_what_cannot_be_sharded_is_refused_with_the_way_out() -> None:
    model = rewritten(Stack(), ROWS, "static")
    with pytest.raises(ConfigError, match="torchrun"):
        fully_shard(model)
    with pytest.raises(ModelError, match="made by fractrainify"):
        fully_shard(Stack())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Did you mean 'mp_policy'"):
        fully_shard(model, mp_polic=None)


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@pytest.mark.usefixtures("alone")
def test_models_that_are_sharded_or_cannot_be_are_refused() -> None:
    model = rewritten(Stack(), ROWS, "static")
    fully_shard(model)
    with pytest.raises(ModelError, match="sharded already"):
        fully_shard(model)
    with pytest.raises(ModelError, match="save_pretrained"):
        model.restore()
    with pytest.raises(ModelError, match=r"scale is a single number.*shape \(1,\)"):
        fully_shard(rewritten(Scaled(), ROWS, "float"))
    elsewhere = rewritten(Stack(), ROWS, "static")
    torch_fully_shard(elsewhere.get_submodule("0"))
    with pytest.raises(ModelError, match=r"fractrain_fx\.distributed\.fully_shard"):
        elsewhere(ROWS)
    with pytest.raises(ModelError, match="sharded already, by torch's own"):
        fully_shard(elsewhere)
    with pytest.raises(ModelError, match=r"call the model itself"):
        model.forward(ROWS)
