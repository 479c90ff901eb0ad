"""Norms, GELUs and attention's probabilities are made again in backward instead of kept, with the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fractrain_fx import Engine, FracModel, RunConfig
from fractrain_fx.execution.attention import Probabilities
from fractrain_fx.execution.remade import ModuleMaker
from fractrain_fx.zoo.models.transformer import TransformerLM
from tests.build import paper
from tests.build import rewritten as build_rewritten
from tests.models import thinned


def text() -> tuple[nn.Module, Tensor]:
    return TransformerLM(50, width=32, hidden=64, layers=3, heads=2, dropout=0.1), torch.randint(50, (4, 16))


def images() -> tuple[nn.Module, Tensor]:
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", **sizes), torch.randn(4, 3, 32, 32)


def keep_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    for maker in (ModuleMaker, Probabilities):
        monkeypatch.setattr(maker, "recipe_of", lambda *_: None)


@pytest.mark.parametrize("build", [text, images])
@pytest.mark.parametrize(
    ("settings", "how"),
    thinned(
        [
            ({"method": "pfq"}, None),
            ({"method": "dfq", "run": RunConfig(skipping="left-out")}, None),
            ({"method": "dfq"}, None),
            ({"method": "pfq"}, "autocast"),
            ({"method": "dfq"}, "checkpointed"),
            ({"method": "static", "format": "mx", "recipe": "mxfp8"}, None),
        ],
        2,
    ),
)
def test_the_numbers_are_those_of_ops_that_keep_their_operands(
    build: Callable[[], tuple[nn.Module, Tensor]],
    settings: dict[str, Any],
    how: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = rewritten(build, **settings)
    if how == "checkpointed":
        model.gradient_checkpointing_enable()
    remade = step(copy.deepcopy(model), x, how == "autocast")
    keep_operands(monkeypatch)
    kept = step(model, x, how == "autocast")
    assert remade.keys() == kept.keys()
    assert all(torch.equal(remade[name], kept[name]) for name in kept)


def rewritten(build: Callable[[], tuple[nn.Module, Tensor]], **settings: Any) -> tuple[FracModel, Tensor]:
    torch.manual_seed(0)
    plain, x = build()
    return build_rewritten(plain, x[:2], config=paper(**settings)).train(), x


def step(model: FracModel, x: Tensor, autocast: bool = False) -> dict[str, Tensor]:
    """The loss, the cost, all gradients and all buffers of a step."""
    engine = Engine(model)
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(x).float().square().mean()
    loss = engine.loss(loss)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "cp": model.cost.cp.detach(), **found, **dict(model.named_buffers())}


@pytest.mark.parametrize("build", [text, images])
def test_norms_gelus_and_probabilities_are_not_kept(
    build: Callable[[], tuple[nn.Module, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = rewritten(build, method="pfq")
    made = made_bytes(model, x)
    least = kept_bytes(model, x)
    keep_operands(monkeypatch)
    assert made > 0.1 * least and kept_bytes(model, x) == least + made


def made_bytes(model: FracModel, x: Tensor) -> int:
    """Bytes of the values that fused ops read and need not keep."""
    running = model._state.running[True].current()
    values: dict[Any, int] = {}
    fused = [n for n in running.graph.nodes if "made" in n.kwargs]
    hooks = []
    for node in {n.kwargs["made"].value for n in fused}:
        module = running.get_submodule(str(node.target))
        hooks.append(module.register_forward_hook(lambda m, _, y: values.update({m: y.nbytes})))
    model(x)
    for hook in hooks:
        hook.remove()
    return sum(values.values())


def kept_bytes(model: nn.Module, x: Tensor) -> int:
    storages: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return saved

    with saved_tensors_hooks(pack, lambda saved: saved):
        loss = model(x).sum()
    loss.backward()
    return sum(storages.values())


class _Attention(nn.Module):
    """Attention with dropout and a mask that is trained, as tables of relative positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.bias = nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, self.bias, dropout_p=0.5)
        return x + self.out(y.transpose(1, 2).flatten(2))


def test_dropout_and_a_trained_mask_get_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> tuple[nn.Module, Tensor]:
        return nn.Sequential(_Attention(), _Attention(), _Attention()), torch.randn(4, 8, 32)

    model, x = rewritten(build, method="static")
    assert sum(isinstance(module, Probabilities) for module in model.modules()) == 3
    remade = step(copy.deepcopy(model), x)
    keep_operands(monkeypatch)
    kept = step(model, x)
    assert remade["1.bias"].count_nonzero() == 128
    assert all(torch.equal(remade[name], kept[name]) for name in kept)


def test_backward_runs_twice_with_the_graph_retained() -> None:
    model, x = rewritten(text, method="pfq")
    loss, weight = model(x).sum(), model.get_parameter("layers.0.attention.q_proj.weight")
    once, again = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, again)


def test_a_norm_with_a_hook_is_not_run_again() -> None:
    model, x = rewritten(text, method="pfq")
    calls: list[int] = []
    model.get_submodule("layers.0.norm1").register_forward_hook(lambda *_: calls.append(1))
    model(x).sum().backward()
    assert calls == [1]


class _Changed(nn.Module):
    """An output of a module is changed before the layer behind it reads it."""

    def __init__(self, module: nn.Module, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.first, self.module, self.reader, self.last = nn.Linear(8, 8), module, nn.Linear(8, 8), nn.Linear(8, 4)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        h = self.module(self.first(x))
        self.change(h)
        return self.last(self.reader(h))


def set_item(h: Tensor) -> None:
    h[:, 0] = 0


def fill_view(h: Tensor) -> None:
    h[:, :2].fill_(0)


def write_detached(h: Tensor) -> None:
    h.data[:, 0] = 0


def scale_in_a_list(h: Tensor) -> None:
    torch._foreach_mul_([h], 2.0)


def drop(h: Tensor) -> None:
    nn.functional.dropout(h, 0.5, inplace=True)


@pytest.mark.parametrize("module", [nn.LayerNorm(8), nn.GELU()], ids=["norm", "gelu"])
@pytest.mark.parametrize("change", [set_item, fill_view, write_detached, scale_in_a_list, drop])
def test_an_output_that_is_written_into_is_read_as_written(module: nn.Module, change: Callable[[Tensor], None]) -> None:
    assert_gradients_as_shown(_Changed(copy.deepcopy(module), change), torch.randn(4, 8))


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.GELU(), nn.Dropout(0.5, inplace=True)),
        nn.Sequential(nn.LayerNorm(8), nn.ReLU(inplace=True)),
        timm.layers.GroupNormAct(8, 4, drop_layer=nn.Dropout),
        timm.layers.GroupNormAct(8, 4, act_layer=nn.RReLU),
    ],
    ids=["dropout", "relu", "norm-with-dropout", "norm-with-noise"],
)
def test_modules_that_compute_something_else_each_time_are_not_run_again(module: nn.Module) -> None:
    assert_gradients_as_shown(_Changed(copy.deepcopy(module), lambda h: None), torch.randn(4, 8))


def assert_gradients_as_shown(plain: nn.Module, x: Tensor) -> None:
    model = build_rewritten(plain, x, config=paper("static", precision="FW-8/BW-32")).train()
    found = []
    for run in (model, model.graph_module):
        torch.manual_seed(1)
        out = run(x)
        loss = (out[0] if isinstance(out, tuple) else out).square().sum()
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    assert all(map(torch.equal, *found))


def test_queries_keys_and_values_share_one_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = rewritten(text, method="pfq")
    loss, calls = model(x).sum(), []
    forward = nn.LayerNorm.forward

    def called(self: nn.LayerNorm, y: Tensor) -> Tensor:
        calls.append(self)
        return forward(self, y)

    monkeypatch.setattr(nn.LayerNorm, "forward", called)
    loss.backward()
    assert len(calls) == len(set(map(id, calls))) == 6
