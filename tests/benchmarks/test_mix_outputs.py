"""Mixing a block's outputs, the original code's way, agrees with mixing inputs wherever the two must."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.mix_outputs import mixing_passes
from fractrain_fx import Engine, FracConfig, FracModel, Pin, Precision, fractrainify
from fractrain_fx.errors import ModelError
from fractrain_fx.nn.gates import Controller
from fractrain_fx.passes import default_passes, facts
from tests.models import HUGGING_FACE, thinned

OPTIONS = ("0/0", "2/6", "3/6", "6/12")


class Forced(nn.Module):
    """A controller that picks what it is told, or option 1 where a block cannot be skipped."""

    def __init__(self, picks: Tensor, real: Controller) -> None:
        super().__init__()
        self.picks, self.real = picks, real

    def forward(self, embedding: Tensor, state: object, skippable: bool) -> tuple[Tensor, object]:
        choice, state = self.real(embedding, state, skippable)
        picks = self.picks if skippable else self.picks.clamp(min=1)
        forced = F.one_hot(picks, choice.shape[1]).to(choice.dtype)
        return forced + choice - choice.detach(), state


def both(model: nn.Module, x: Tensor, picks: list[int], **changes: object) -> list[FracModel]:
    """The model under both mixings, with equal weights and ranges, and with every sample's option given."""
    made = []
    for passes in (default_passes, mixing_passes):
        torch.manual_seed(1)
        config = FracConfig(method="dfq", options=OPTIONS, **changes)  # type: ignore[arg-type]
        chain = passes(config)
        rewritten = fractrainify(copy.deepcopy(model), config=config, example_inputs=(x,), check=False, passes=chain)
        frac = rewritten.get_submodule("frac")
        frac.controller = Forced(torch.tensor(picks), frac.controller)  # type: ignore[arg-type]
        made.append(rewritten)
    made[0].calibrate([x])
    made[1].load_state_dict(made[0].state_dict())
    return made


@pytest.mark.parametrize("name", thinned(["resnet10t", "vit_tiny_patch16_224", "vgg11", "mobilenetv2_050"], 4))
def test_samples_that_agree_get_the_same_values(name: str) -> None:
    size: dict[str, Any] = {"img_size": 32, "depth": 2} if name.startswith("vit") else {}
    if name == "vgg11":
        features: Any = timm.create_model("vgg11").features
        model: nn.Module = nn.Sequential(*features[:9], nn.Flatten(), nn.Linear(256 * 64, 3))
    else:
        model = timm.create_model(name, num_classes=3, **size)
    x = torch.randn(3, 3, 32, 32)
    inputs, outputs = both(model, x, [3, 3, 3])
    assert any(facts(node).role == "mix" for node in outputs.graph.nodes)
    assert len(outputs.ops) == len(inputs.ops) and outputs.macs == inputs.macs
    seen = []
    for option in range(len(OPTIONS)):
        for each in (inputs, outputs):
            each.get_submodule("frac.controller").picks.fill_(option)  # type: ignore[operator]
        with torch.no_grad():
            expected, actual = inputs.eval()(x), outputs.eval()(x)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert outputs.cost.cp == inputs.cost.cp
        seen.append(expected)
    assert not any(torch.allclose(seen[-1], other) for other in seen[:-1])


def test_a_block_of_one_op_agrees_for_any_choices() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    x = torch.randn(8, 5)
    inputs, outputs = both(model, x, [1, 2, 3, 1, 2, 3, 3, 1])
    gradients = []
    for each in (inputs.eval(), outputs.eval()):
        out = each(x)
        out.square().sum().backward()
        of_gate = {n: p.grad for n, p in each.named_parameters() if n.startswith("frac.") and p.grad is not None}
        gradients.append((out.detach(), each.get_parameter("2.weight").grad, of_gate))
    torch.testing.assert_close(gradients[1][:2], gradients[0][:2], rtol=1e-5, atol=1e-6)
    # <g, Q_k(x) w> and <g w, Q_k(x) - x> differ by what is common to all options, which softmax takes away.
    assert gradients[0][2].keys() == gradients[1][2].keys() and gradients[0][2]
    torch.testing.assert_close(gradients[1][2], gradients[0][2], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_every_parameter_and_gate_is_trained(name: str) -> None:
    case = HUGGING_FACE[name]()
    config = FracConfig(method="fractrain", options=OPTIONS)
    model = fractrainify(
        case.model, config=config, example_kwargs=case.keywords, check=False, passes=mixing_passes(config)
    )
    engine = Engine(model)
    out = model(**case.keywords)
    tensors = [value for value in out.values() if isinstance(value, Tensor) and value.requires_grad]
    engine.loss(torch.stack([value.float().square().mean() for value in tensors]).sum()).backward()
    for parameter, value in model.named_parameters():
        if parameter.startswith("frac."):
            assert value.grad is not None and value.grad.isfinite().all(), parameter


def test_gradients_of_samples_that_picked_another_option_are_zero_not_noise() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    x = torch.randn(2, 5)
    _, outputs = both(model, x, [1, 3])
    seen: dict[str, Tensor] = {}
    for node in outputs.graph.nodes:
        if facts(node).role == "gradient" and facts(node).owner == "2":
            module = outputs.graph_module.get_submodule(str(node.target))

            def hook(_: object, __: object, out: Tensor, name: str = str(node.target)) -> None:
                out.register_hook(lambda g: seen.setdefault(name, g))

            module.register_forward_hook(hook)
    outputs.train()
    outputs.graph_module(x)[0].sum().backward()
    assert len(seen) == 3
    rows = torch.stack([g.abs().sum(1) > 0 for g in seen.values()])
    assert rows.sum().item() <= 2 and rows.any()


def test_what_cannot_be_copied_is_an_error() -> None:
    class Leaking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.body, self.head = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            kept = torch.zeros_like(x)
            kept += self.body(x)
            return self.head(kept)

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.first, self.second, self.head = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            kept = torch.zeros_like(x)
            y = self.first(x)
            kept += y
            return self.head(x + self.second(kept.relu()))

    config = FracConfig(options=OPTIONS)
    given: dict[str, Any] = {"config": config, "example_inputs": (torch.randn(2, 4),), "check": False}
    fractrainify(Leaking(), passes=mixing_passes(config), **given)
    with pytest.raises(ModelError, match="changes a value from outside in place"):
        fractrainify(InPlace(), passes=mixing_passes(config), **given)


@pytest.mark.long
def test_pinned_ops_inside_a_block_keep_their_bits() -> None:
    model = timm.create_model("resnet10t", num_classes=3)
    x = torch.randn(2, 3, 32, 32)
    _, outputs = both(model, x, [2, 2], pins=(Pin("layer1.0.conv2", Precision(8, 16)),))
    assert {op.name: op.precision.mode for op in outputs.ops}["layer1.0.conv2"] == "pinned"
    outputs.train()
    outputs(x).sum().backward()
