"""Where samples lie: the same with and without data; the batch as a whole where a model holds one batch size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

from fractrain_fx import Engine, FracConfig, fractrainify, plan, summarize
from fractrain_fx.capture import record
from fractrain_fx.capture.inputs.examples import example_inputs
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.passes import Shapes, facts
from tests.models import HUGGING_FACE, thinned


def swin() -> nn.Module:
    sizes: dict[str, Any] = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
    config = transformers.SwinConfig(window_size=4, **sizes)
    return transformers.SwinForImageClassification(config)


def botnet() -> nn.Module:
    return timm.create_model("botnet26t_256", num_classes=10)


def bloom() -> nn.Module:
    return transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4))


def tnt() -> nn.Module:
    return timm.create_model("tnt_s_patch16_224", img_size=64, depth=2, num_classes=10)


def places(make: Callable[[], nn.Module], device: str) -> dict[str, tuple[tuple[int, ...] | None, BatchAxis | None]]:
    with torch.device(device):
        model = make()
    args, kwargs = example_inputs(model)
    recording = record(model, args, kwargs, check=False)
    given = recording.call.bind(recording.args, recording.kwargs)
    for node, value in zip(recording.train.graph.find_nodes(op="placeholder"), given, strict=True):
        node.meta["example"] = value if device == "cpu" else value.to("meta")
    Shapes()(recording.train)
    return {node.name: (facts(node).shape, facts(node).batch) for node in recording.train.graph.nodes}


@pytest.mark.parametrize("make", thinned([swin, botnet, bloom, tnt], 2))
def test_without_data_every_axis_and_every_fold_is_the_same(make: Callable[[], nn.Module]) -> None:
    real = places(make, "cpu")
    assert places(make, "meta") == real
    assert any(axis is not None and axis.factor > 1 for _, axis in real.values())


@pytest.mark.long
def test_a_plan_without_data_is_the_plan() -> None:
    case = HUGGING_FACE["llama"]()
    with torch.device("meta"):
        shapes_only = type(case.model)(case.model.config)
    real, meta = (plan(m, example_kwargs=case.keywords).to_dict() for m in (case.model, shapes_only))
    assert "not compared" in meta.pop("notes")[0]
    assert all("conditions on sizes" in note or "rounds by plain" in note for note in real.pop("notes"))
    assert meta == real
    rewritten, usual = (fractrainify(m, example_kwargs=case.keywords, check=False) for m in (shapes_only, case.model))
    assert [op.precision for op in rewritten.ops] == [op.precision for op in usual.ops]
    assert len(rewritten.graph.nodes) == len(usual.graph.nodes)


class OneSize(nn.Module):
    """Holds one state for each of two samples."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = (nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("state", torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.body(x + self.state).relu()
        return self.head(x)


@pytest.mark.parametrize("check", [True, False])
def test_one_batch_size_is_the_reason_given(check: bool) -> None:
    x = torch.randn(2, 4)
    model = fractrainify(OneSize(), config=FracConfig(method="pfq"), example_inputs=(x,), check=check)
    assert {op.name: op.macs for op in model.ops} == dict.fromkeys(("stem", "body", "head"), 16)
    assert "runs at one batch size only" in str(summarize(model))


def test_gates_of_a_model_with_one_batch_size_choose_once_for_the_batch() -> None:
    x = torch.randn(2, 4)
    model = fractrainify(OneSize(), example_inputs=(x,), check=False)
    engine = Engine(model)
    engine.loss(model(x).square().mean()).backward()
    ((block, choice),) = model.cost.choice.items()
    assert block == "model" and choice.shape == (1, len(model.frac_config.gate_options)) and choice.sum() == 1
    assert "the gates choose once for the whole batch" in " ".join(str(summarize(model)).split())
    gates = {name: p for name, p in model.named_parameters() if name.startswith("frac.")}
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for n, p in gates.items() if "gates" in n and "bias" in n)
    meter: Any = model.get_submodule("frac.cost")
    spent = (choice @ meter.table[0].sum(1)).item()
    assert model.cost.cp.item() == pytest.approx(spent / meter.full.sum().item())


class Sampling(nn.Module):
    """Folds heads into the batch and adds what it draws, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).view(-1, 3, 2, 4).transpose(1, 2).reshape(-1, 3, 4)
        y = y + 0.1 * torch.bmm(y, y.mT) @ torch.rand_like(y)
        return self.head(y.view(-1, 2, 3, 4).transpose(1, 2).reshape(-1, 3, 8))


def test_what_a_model_draws_is_not_taken_for_another_sample() -> None:
    model = fractrainify(Sampling(), example_inputs=(torch.randn(2, 3, 8),), check=False)
    products = [node for node in model.graph.nodes if (op := facts(node).op) is not None and op.kind == "matmul"]
    assert [facts(node).batch for node in products] == [BatchAxis(0, 2)]


@pytest.mark.parametrize("batch", [1, 4])
def test_whole_numbers_stay_rows_of_the_tables_they_index(batch: int) -> None:
    class Categories(nn.Module):
        """Each column of its input has a table of its own, and the last rows of both are used."""

        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList([nn.Embedding(4, 8), nn.Embedding(7, 8)])
            self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.stack([table(x[:, i]) for i, table in enumerate(self.tables)], dim=1)
            x = x + self.mix(x.flatten(0, 1)).unflatten(0, (-1, 2))
            return self.head(x.mean(1))

    rows = torch.tensor([[3, 6]] * batch)
    model = fractrainify(Categories(), config=FracConfig(method="static"), example_inputs=(rows,), check=False)
    assert model(torch.tensor([[0, 5], [2, 1]])).shape == (2, 1)


class Codebook(nn.Module):
    """Moves a parameter that it does not train towards each batch, whatever the mode, and keeps a list of means."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.codes = nn.Linear(4, 4), nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        self.codes.data.lerp_(y.detach().mean(0), 0.1)
        return y + self.codes


def test_passes_leave_a_parameter_that_a_forward_writes_to() -> None:
    model = Codebook()
    before = model.codes.clone()
    rewritten = fractrainify(model, config=FracConfig(method="float"), example_inputs=(torch.randn(3, 4),), check=False)
    assert torch.equal(model.codes, before) and not model.codes.requires_grad
    rewritten(torch.randn(3, 4))
    assert not torch.equal(model.codes, before)
