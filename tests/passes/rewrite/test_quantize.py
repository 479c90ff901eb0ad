"""Which operand of a contraction is rounded as what, and which contractions share a rounded operand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import FracConfig, fractrainify
from fractrain_fx.nn.quantizers import ActivationQuantizer, MixedActivationQuantizer, WeightQuantizer
from tests.build import rewritten


@pytest.mark.parametrize("method", ["pfq", "fractrain"])
def test_what_a_contraction_reads_from_another_one_directly_is_an_activation(method: str) -> None:
    four = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model = fractrainify(four, config=FracConfig(method=method), example_inputs=(torch.randn(2, 4),), check=False)  # type: ignore[arg-type]
    for layer in ("1", "2"):
        quantizers = model.get_submodule(f"frac.quant.{layer}")
        assert isinstance(quantizers.input, ActivationQuantizer | MixedActivationQuantizer)
        assert isinstance(quantizers.weight, WeightQuantizer)
    called = [str(node.target) for node in model.graph.nodes if node.op == "call_module"]
    assert sum(name.endswith(".weight") for name in called) == 2


class _Reread(nn.Module):
    """Two layers read a tensor, which is changed between them. The first layer is frozen, so autograd allows that."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.first, self.query, self.key, self.last = (nn.Linear(8, 8) for _ in range(4))
        self.query.requires_grad_(False)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) + 0
        query = self.query(h)
        self.change(h)
        return self.last(query + self.key(h))


def set_item(h: Tensor) -> None:
    h[:, 0] = 3.0


def fill_view(h: Tensor) -> None:
    h[:, 0].fill_(3.0)


def fill_view_of_view(h: Tensor) -> None:
    h.view(-1)[:4].mul_(3.0)


def scale(h: Tensor) -> None:
    h.mul_(3.0)


@pytest.mark.parametrize("change", [set_item, fill_view, fill_view_of_view, scale])
def test_layers_that_read_a_tensor_before_and_behind_a_write_round_it_each(change: Callable[[Tensor], None]) -> None:
    torch.manual_seed(0)
    plain, x = _Reread(change), torch.randn(6, 8)
    with torch.no_grad():
        expected = plain(x)
        model = rewritten(plain, x, method="static", precision="FW-16/BW-32").train()
        run, shown = model(x), model.graph_module(x)[0]
    assert torch.equal(run, shown)
    assert (run - expected).abs().max() < 1e-3  # 16 bits; the change is of the order of 1


def test_layers_that_read_a_tensor_behind_all_writes_share_a_quantizer() -> None:
    class Read(_Reread):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            self.change(h)
            return self.last(self.query(h) + self.key(h))

    model = rewritten(Read(set_item), torch.randn(6, 8), method="static")
    assert model.get_submodule("frac.quant.query").input
    assert not hasattr(model.get_submodule("frac.quant.key"), "input")
