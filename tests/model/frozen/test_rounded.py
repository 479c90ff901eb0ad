"""``restore(rounded=True)``: a float model with the weights that training multiplied, and ``restore()``'s warning."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import FracModel, Pin, Precision
from fractrain_fx.errors import ConfigError, FracTrainWarning, ModelError
from fractrain_fx.formats import get_format
from tests import build


class Tied(nn.Module):
    """An embedding that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(self.embed(tokens)).relu())
        return y


def rewritten(net: nn.Module, *example: Tensor, **config: Any) -> FracModel:
    return build.rewritten(net, *example, config=build.paper(**config))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(96, 5))


@pytest.mark.parametrize("settings", [{"method": "pfq"}, {"method": "dfq", "weight_bits": 4}, {"format": "dorefa"}])
def test_weights_of_the_copy_are_what_the_quantizers_of_the_present_stage_give(settings: dict[str, Any]) -> None:
    original = net()
    model = rewritten(original, torch.randn(2, 3, 8, 8), pins=(Pin("last", Precision(8, 8)),), **settings)
    if settings.get("method") == "pfq":
        model.set_precision("FW-4/BW-6")
    before = {name: value.clone() for name, value in original.state_dict().items()}
    copied = model.restore(rounded=True)
    assert type(copied) is nn.Sequential and copied is not original
    fmt = get_format(settings.get("format", "affine"))
    widths = {"0": 32, "2": 4 if "method" in settings else 6, "4": 8}
    for layer, bits in widths.items():
        weight, bias = original.get_parameter(f"{layer}.weight").detach(), original.get_parameter(f"{layer}.bias")
        expected = weight if bits == 32 else fmt.weight(weight, torch.tensor(bits), dim=0)
        assert torch.equal(copied.get_parameter(f"{layer}.weight"), expected)
        assert torch.equal(copied.get_parameter(f"{layer}.bias"), bias)
    assert all(torch.equal(value, before[name]) for name, value in original.state_dict().items())


def test_a_weight_that_is_looked_up_in_float_and_multiplied_rounded_has_no_rounded_value() -> None:
    tokens = torch.randint(9, (2, 3))
    model = rewritten(Tied(), tokens, method="static", pins=(Pin("last", Precision(8, 8)),))
    with pytest.raises(ModelError, match=r"embed\.weight is multiplied rounded in one place, and read in float"):
        model.restore(rounded=True)
    assert rewritten(Tied(), tokens, method="static").restore(rounded=True)  # the head is float


def test_formats_that_round_weights_for_each_product_are_refused() -> None:
    model = rewritten(net(), torch.randn(2, 3, 8, 8), method="static", format="mx")
    with pytest.raises(ConfigError, match=r"2\.weight is rounded anew for each product"):
        model.restore(rounded=True)


def test_codes_keep_their_values() -> None:
    torch.manual_seed(1)
    original = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).requires_grad_(
        False
    )
    original[4].requires_grad_(True)
    model = rewritten(original, torch.randn(4, 8), method="static", precision="FW-4/BW-8")
    model.pack_frozen()
    values = model.get_submodule("2").__dict__["weight"].values()
    copied = model.restore(rounded=True)
    assert torch.equal(copied.get_parameter("2.weight"), values)
    assert torch.equal(original.get_parameter("2.weight"), values)


def test_restore_says_once_that_the_result_computes_in_float_if_the_model_does_not() -> None:
    model = rewritten(net(), torch.randn(2, 3, 8, 8), method="static")
    with pytest.warns(FracTrainWarning, match=r"computes in float.*restore\(rounded=True\)"):
        model.restore()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.restore()
        rewritten(net(), torch.randn(2, 3, 8, 8), method="float").restore()
        rewritten(net(), torch.randn(2, 3, 8, 8), method="static").restore(rounded=True)
