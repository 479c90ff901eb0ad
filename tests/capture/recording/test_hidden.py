"""What multiplies inside a function, an operator or a module that is one node is in the table, as uncounted."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from fractrain_fx import Engine, FracConfig, fractrainify, summarize
from fractrain_fx.capture.recording.kept.hidden import contractions_in_backward
from fractrain_fx.errors import ModelError


class Twice(torch.autograd.Function):
    """Multiplies in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t() + torch.mm(x, w.t())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return 2 * g @ w, 2 * g.t() @ x


class OnlyBack(torch.autograd.Function):
    """Multiplies on the way back alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.einsum("ij,jk->ik", g, torch.eye(8))


class Blocks(torch.autograd.Function):
    """Runs layers inside, as reversible networks do, and is given a list that no graph holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: list[nn.Module]) -> Tensor:
        for layer in layers:
            x = x + layer(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


class Core(nn.Module):
    """Has no weights, multiplies, and is kept whole: values decide what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ (x.t() if x.sum() > 1e6 else 0.5 * x.t()) @ x


class Plain(torch.autograd.Function):
    """Multiplies no matrices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.relu()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.weight, self.core = nn.Parameter(torch.randn(8, 8)), Core()
        self.inner = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.block(Plain.apply(x))
        x = OnlyBack.apply(Twice.apply(x, self.weight))
        return self.head(self.core(Blocks.apply(x, list(self.inner))))


def test_every_such_call_has_a_row_with_what_is_inside_and_the_count_stands_beside_the_shares() -> None:
    model = fractrainify(Net(), config=FracConfig(method="dfq"), example_inputs=(torch.randn(4, 6),))
    told = {op.name: op.precision.reason.rpartition(": ")[2] for op in model.ops if op.macs is None}
    assert told == {
        "Twice": "1 matmul, 1 mm",
        "OnlyBack": "1 einsum in backward",
        "Blocks": "2 linear",
        "core": "2 matmul",
    }
    assert model.uncounted == 4 and {op.precision.mode for op in model.ops if op.macs is None} == {"uncounted"}
    assert "(4 uncounted, in no share)" in str(summarize(model))
    engine = Engine(model)
    engine.loss(model(torch.randn(4, 6)).square().mean()).backward()
    engine.end_epoch()
    assert engine.ledger.rows[0].uncounted == 4


@torch.library.custom_op("fractrain_fx_tests::product", mutates_args=())
def product(x: Tensor, w: Tensor) -> Tensor:
    return _product(x, w)


def _product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


product.register_autograd(
    lambda ctx, g: (g @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].t() @ g),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("fractrain_fx_tests::doubled", mutates_args=())
def doubled(x: Tensor, w: Tensor) -> Tensor:
    return 2 * x + w.sum()


def by_value(x: Tensor, w: Tensor) -> Tensor:
    return x @ w if float(x.sum()) > 1e6 else 2 * (x @ w)


class Foreign(nn.Module):
    """Calls operators of other libraries, and a function and a method in which values decide."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = product(self.stem(x), self.weight)
        x = x + by_value(x.detach(), self.weight.detach()) + self.by_value(x)
        x = x + doubled(x.detach(), self.weight.detach())
        boxes = torch.tensor([[0.0, 0.0, 0.0, 3.0, 3.0]])
        maps = x.reshape(1, -1, 2, 4)
        x = x + torchvision.ops.roi_align(maps, boxes, 2).sum()
        return self.head(self.block(x))

    @torch.no_grad()
    def by_value(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight) if float(x.sum()) > 1e6 else x * 1


def test_operators_of_other_libraries_and_functions_that_read_values_have_rows_too() -> None:
    model = fractrainify(Foreign(), config=FracConfig(method="float"), example_inputs=(1e6 * torch.ones(4, 6),))
    told = {op.name: op.precision.reason.removeprefix("stays float, inside ") for op in model.ops if op.macs is None}
    assert told == {
        "product": "the operator fractrain_fx_tests::product: 1 matmul",
        "by_value": f"the call of {__name__}.by_value(): 1 matmul",
        "roi_align": "the operator torchvision::roi_align: calls that torch does not show",
    }


class Similar(nn.Module):
    """Has no weights, and multiplies without gradients: once what it is given, once numbers that follow from sizes."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            places = torch.arange(x.shape[0], dtype=torch.float32)
            scale = torch.softmax(x @ x.t(), -1).mean() + torch.outer(places, places).mean()
        return x * scale


def test_products_without_gradients_have_a_row_if_they_depend_on_values_of_the_input() -> None:
    net = nn.Sequential(nn.Linear(6, 8), Similar(), nn.Linear(8, 2))
    model = fractrainify(net, config=FracConfig(method="float"), example_inputs=(torch.randn(4, 6),))
    told = {op.name: op.precision.reason for op in model.ops if op.macs is None}
    assert told == {"1": "stays float, inside a module kept whole: 1 matmul"}


def test_a_model_that_multiplies_nowhere_else_is_told_so() -> None:
    class Hidden(Net):
        def forward(self, x: Tensor) -> Tensor:
            return Twice.apply(x, self.weight)

    with pytest.raises(ModelError, match="lie inside calls that a graph cannot see into: 'Twice'"):
        fractrainify(Hidden(), config=FracConfig(method="static"), example_inputs=(torch.randn(4, 8),))


def test_a_model_whose_tensors_lie_in_an_object_of_its_own_is_told_so() -> None:
    class Unpacks(Net):
        def forward(self, batch: Any) -> Tensor:
            return super().forward(batch.x)

    with pytest.raises(ModelError, match="pass tensors, or lists, tuples, mappings or dataclasses of them"):
        fractrainify(
            Unpacks(), config=FracConfig(method="float"), example_inputs=(SimpleNamespace(x=torch.randn(4, 6)),)
        )


def test_the_code_of_backward_is_looked_through_for_contractions() -> None:
    assert contractions_in_backward(Plain) == Counter()
    assert contractions_in_backward(Twice) == Counter({"matmul in backward": 1})
    assert contractions_in_backward(torch.autograd.Function) == Counter()
