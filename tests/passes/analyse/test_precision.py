"""Which contractions stay float whatever the method, and models in which all do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import FracConfig, fractrainify, plan
from fractrain_fx.errors import ModelError, PassError
from fractrain_fx.passes import DecidePrecision, Macs, Shapes
from tests.passes.analyse.calls import Calls


class Numbers(nn.Module):
    """A product of complex numbers and one of integers, between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.middle, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.complex = nn.Parameter(torch.randn(8, 8, dtype=torch.cfloat))
        self.register_buffer("whole", torch.ones(8, 8, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.stem(x))
        counts = x.long() @ self.get_buffer("whole")
        return self.head(x + (x.to(torch.cfloat) @ self.complex).real + counts)


@pytest.mark.parametrize("method", ["static", "pfq", "fractrain", "slu"])
def test_products_of_other_than_real_numbers_stay_float(method: str) -> None:
    x = torch.randn(4, 8)
    model = fractrainify(Numbers(), config=FracConfig(method=method), example_inputs=(x,), check=False)  # type: ignore[arg-type]
    ops = {op.name: op.precision.words for op in model.ops}
    assert (ops["complex"], ops["matmul"]) == ("float: complex", "float: integers")
    model(x).sum().backward()
    assert all(p.grad is not None for p in (model.get_parameter("complex"), model.get_parameter("stem.weight")))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("method", ["static", "pfq"])
def test_layers_of_width_0_stay_float_and_train(method: str) -> None:
    squeeze = nn.Sequential(nn.Linear(8, 0), nn.ReLU(), nn.Linear(0, 8))
    net = nn.Sequential(nn.Linear(8, 8), squeeze, nn.Linear(8, 8), nn.Linear(8, 2))
    x = torch.randn(4, 8)
    model = fractrainify(net, config=FracConfig(method=method), example_inputs=(x,))  # type: ignore[arg-type]
    words = {op.name: op.precision.words for op in model.ops}
    assert words["1.0"] == words["1.2"] == "float: no numbers, one of its sizes is 0"
    assert words["2"].startswith("scheduled")
    model(x).sum().backward()
    assert model.get_parameter("2.weight").grad is not None


class Whole(nn.Module):
    """A bilinear layer and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x, x)
        return y


class Steps(nn.Module):
    """A recurrent layer and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)[0]
        return y


@pytest.mark.parametrize(("model", "shape", "macs"), [(Whole, (2, 4), 60), (Steps, (2, 5, 4), 5 * 12 * 7)])
def test_a_model_whose_only_product_stays_whole_is_counted(
    model: type[nn.Module], shape: tuple[int, ...], macs: int
) -> None:
    ops = plan(model(), config=FracConfig(method="float"), example_inputs=(torch.randn(shape),)).ops
    assert [(op.macs, op.precision.mode) for op in ops] == [(macs, "float")]
    with pytest.raises(ModelError, match="finds no block to gate"):
        plan(model(), config=FracConfig(method="dfq"), example_inputs=(torch.randn(shape),))


def test_a_model_in_which_nothing_can_be_quantized_is_told_so() -> None:
    with pytest.raises(ModelError, match="finds nothing to quantize"):
        plan(Whole(), config=FracConfig(method="static"), example_inputs=(torch.randn(2, 4),))


def test_the_parts_of_a_float_models_cost_are_over_the_same_ops_as_cp() -> None:
    x = torch.randn(2, 4)
    model = fractrainify(Whole(), config=FracConfig(method="float"), example_inputs=(x,), check=False)
    model(x)
    cost = model.cost
    assert cost.cp == cost.cp_total == cost.fw == cost.gc == 1
    assert cost.eb == 0  # the first layer needs no gradient of its input


def test_precisions_are_decided_after_blocks() -> None:
    config = FracConfig(method="static")
    with pytest.raises(PassError, match="run the Blocks pass before"):
        fractrainify(
            Calls(lambda x: x),
            config=config,
            example_inputs=(torch.randn(2, 4),),
            passes=[Shapes(), Macs(), DecidePrecision(config)],
            check=False,
        )
