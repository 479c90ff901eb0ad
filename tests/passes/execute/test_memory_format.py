"""Convolutions compute with the channels innermost in memory; nobody outside sees another order or other numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import FracConfig, FracModel, RunConfig, fractrainify
from fractrain_fx.config import Backend, MemoryFormat
from fractrain_fx.execution.fused_op import FusedOp
from fractrain_fx.execution.plan import convolves_channels_last
from fractrain_fx.passes import fused_ops
from tests.build import rewritten as build_rewritten

LAST = torch.channels_last
oneDNN = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="channels last pays with oneDNN only")


class Net(nn.Module):
    """Convolutions with what stands between them, then a reader that needs the usual order."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.grouped, self.down = nn.Conv2d(16, 16, 3, padding=1, groups=4), nn.Conv2d(16, 16, 1, stride=2)
        self.tokens, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.norm(self.stem(x)))
        x = self.down(x + self.grouped(x))
        halves = x.view(len(x), 2, 8, *x.shape[2:]).flip(1)  # fails in any other order
        mixed = halves.reshape(x.shape).permute(0, 2, 3, 1)
        return self.head(self.tokens(mixed)).mean((1, 2)), x


def _net(*middle: nn.Module) -> nn.Sequential:
    """Layers between two convolutions that stay float, as the first and the last contraction do."""
    return nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), *middle, nn.Conv2d(64, 4, 1))


class Written(nn.Module):
    """Writes into a convolution's output, or into a view of it."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by
        self.first, self.middle, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.first(x))
        if self.by == "view":
            x.flatten(1).mul_(2)
        else:
            x[:, 0] = 0.5
        out: Tensor = self.last(x)
        return out


def _model(net: nn.Module, memory_format: MemoryFormat, backend: Backend = "cpu", **options: Any) -> FracModel:
    config = FracConfig("static", run=RunConfig(backend=backend, memory_format=memory_format), **options)
    torch.manual_seed(1)
    x = torch.randn(4, 3, 12, 12)
    return build_rewritten(copy.deepcopy(net), x, config=config).train()


def _orders(model: FracModel, x: Tensor) -> tuple[Any, dict[str, bool]]:
    """The output, and of each fused convolution whether its output has the channels innermost."""
    seen: dict[str, bool] = {}
    ops = fused_ops(model._state.running[True].current())
    for name, op in ops.items():
        op.register_forward_hook(lambda _, __, y, name=name: seen.update({name: y.is_contiguous(memory_format=LAST)}))
    torch.manual_seed(2)
    return model(x), dict(seen)


@oneDNN
@pytest.mark.parametrize("backend", ["plain", "cpu"])
def test_numbers_and_orders_outside_stay(backend: Backend) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(8, 3, 12, 12)
    found = []
    for memory_format in ("auto", "preserve"):
        model = _model(net, memory_format, backend)
        (logits, images), seen = _orders(model, x)
        assert images.is_contiguous()
        assert seen == dict.fromkeys(("grouped", "down"), memory_format == "auto")
        (logits.square().sum() + images.square().mean()).backward()
        assert all(p.grad is not None and p.grad.is_contiguous() for p in model.parameters())
        found.append([logits, images, *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@oneDNN
def test_a_weight_larger_than_its_image_decides() -> None:
    model = _model(_net(nn.Conv2d(64, 64, 3, padding=1)), "auto")
    _, small = _orders(model, torch.randn(1, 3, 8, 8))
    _, large = _orders(model, torch.randn(64, 3, 8, 8))
    assert (small["1"], large["1"]) == (False, True)


def test_strided_convolutions_that_onednn_gets_wrong_are_left_out() -> None:
    net = _net(nn.Conv2d(64, 8, 3), nn.Conv2d(8, 8, 1, stride=2), nn.Conv2d(8, 64, 1), nn.Conv2d(64, 64, 1, stride=2))
    ops = fused_ops(_model(net, "auto")._state.running[True].current())
    assert [bool(op.plan.channels_last) for op in ops.values()] == [True, False, True, True]


@pytest.mark.parametrize("by", ["view", "index"])
def test_a_write_leaves_the_whole_graph_as_it_is(by: str) -> None:
    model = _model(Written(by), "auto")
    ops = fused_ops(model._state.running[True].current())
    assert [op.plan.channels_last for op in ops.values()] == [False]
    x = torch.randn(2, 3, 12, 12)
    other = _model(Written(by), "preserve")
    other.load_state_dict(model.state_dict())
    torch.manual_seed(2)
    y = model(x)
    torch.manual_seed(2)
    torch.testing.assert_close(y, other(x))


class Halves(nn.Module):
    """Returns several tensors that one call made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _net(nn.Conv2d(64, 64, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        halves: tuple[Tensor, ...] = self.layers(x).chunk(2, 1)
        return halves


def test_a_value_of_several_tensors_leaves_the_whole_graph_as_it_is() -> None:
    assert len(_model(Halves(), "auto")(torch.randn(2, 3, 12, 12))) == 2


class Block(nn.Module):
    """A block whose result is read by ``view``."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3, padding=1), nn.Linear(6400, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        out: Tensor = self.head((x + self.body(x).relu()).view(len(x), -1))
        return out


@pytest.mark.parametrize(
    "options", [{}, {"run.backend": "codes", "run.skipping": "left-out"}, {"run.backend": "plain"}]
)
def test_gated_blocks(options: dict[str, Any]) -> None:
    config = FracConfig("dfq", run=RunConfig(backend="cpu")).replace(options=("FW-0/BW-0", "FW-6/BW-8"), **options)
    x = torch.randn(4, 3, 12, 12)
    model = fractrainify(Block(), config=config, example_inputs=(x,), check=False).train()
    model(x).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_a_user_who_turned_the_weights_gets_that_order() -> None:
    net = _net(nn.Conv2d(64, 64, 3)).to(memory_format=LAST)
    model = _model(net, "auto")
    assert model(torch.randn(2, 3, 12, 12).contiguous(memory_format=LAST)).is_contiguous(memory_format=LAST)


@pytest.mark.parametrize("x", [torch.empty(2, 1, 3, 3), torch.empty(2, 3, 1, 1), torch.empty(2, 3, 4)])
def test_one_channel_and_one_place_have_no_order(x: Tensor) -> None:
    assert not convolves_channels_last(x)


def test_dropout_draws_in_the_usual_order() -> None:
    net = _net(nn.Conv2d(64, 64, 3), nn.Dropout(0.5))
    outputs = []
    for memory_format in ("auto", "preserve"):
        model = _model(net, memory_format)
        torch.manual_seed(3)
        outputs.append(model(torch.ones(2, 3, 12, 12)))
    torch.testing.assert_close(*outputs)


def test_other_convolutions_are_not_images() -> None:
    net = nn.Sequential(nn.Flatten(2), nn.Conv1d(3, 8, 3), nn.Conv1d(8, 8, 3), nn.Conv1d(8, 8, 3))
    ops = fused_ops(_model(net, "auto")._state.running[True].current())
    assert ops and all(isinstance(op, FusedOp) and not op.plan.channels_last for op in ops.values())


class ByKeyword(nn.Module):
    """Calls its first convolution, which stays float, by keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.rest = nn.Parameter(torch.randn(64, 3, 3, 3)), _net(nn.Conv2d(64, 64, 3))[1:]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.rest(nn.functional.conv2d(input=x, weight=self.weight))
        return y


@oneDNN
def test_an_image_by_keyword_is_turned_too() -> None:
    y, seen = _orders(_model(ByKeyword(), "auto"), torch.randn(16, 3, 12, 12))
    assert y.is_contiguous() and seen == {"rest.1": True}


class ViewsImages(nn.Module):
    """Convolves a permuted view, whose channels are innermost, and views the result as rows, as Swin's blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv, self.last = nn.Linear(8, 8), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(self.first(x).permute(0, 3, 1, 2))
        return self.last(h.permute(0, 2, 3, 1).view(-1, 8))


@pytest.mark.parametrize("method", ["pfq", "fractrain"])
def test_the_result_of_a_convolution_lies_as_the_models(method: str) -> None:
    x = torch.randn(2, 4, 4, 8)
    rewritten = fractrainify(ViewsImages(), config=FracConfig(method=method), example_inputs=(x,))  # type: ignore[arg-type]
    assert rewritten(x).shape == (32, 4)
