"""Under gated methods, ops that no gate can choose for follow the stage's target, and count towards it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import Engine, FracConfig, FracModel, GateConfig, Precision, RunConfig, fractrainify, summarize
from fractrain_fx.hardware.run_cost import StepPrices, run_cost
from fractrain_fx.passes import costed
from fractrain_fx.passes.graph.facts import facts
from tests import build

X = torch.randn(4, 3, 6)


class Sorted(nn.Module):
    """A gated block, an expert that reads the tokens of all samples in another order, and a mean that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.expert = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.shared, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.body(x).relu()
        tokens = x.flatten(0, 1)
        order = tokens.sum(1).argsort(0)
        x = x + self.expert(tokens[order])[order.argsort(0)].view_as(x)
        return self.head((x + self.shared(x.mean((0, 1)))).mean(1))


class GraphNetwork(nn.Module):
    """Three layers over a batch of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        for layer in self.layers:
            x = (adjacency @ layer(x)).relu()
        return self.head(x.mean(1))


def rewritten(method: str, **settings: Any) -> FracModel:
    torch.manual_seed(0)
    return build.rewritten(Sorted(), X, config=build.paper(method, **settings)).train()


def modes(model: FracModel) -> dict[str, str]:
    return {op.name: op.precision.mode for op in model.ops}


@pytest.mark.parametrize("method", ["fractrain", "dfq", "slu", "pfq"])
def test_what_cannot_choose_sample_by_sample_is_scheduled(method: str) -> None:
    found = modes(rewritten(method))
    rest = "float" if method == "slu" else "scheduled"
    assert {found["expert"], found["shared"]} == {rest}
    assert found["stem"] == "float" and found["body"] == ("scheduled" if method == "pfq" else "gated")


def test_the_precision_follows_the_target_of_the_stage_and_the_graph_stays() -> None:
    model = rewritten("fractrain", targets=(2.2, 3.0), schedule="manual", run=RunConfig(length=2))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    engine, seen = Engine(model), []
    for _ in range(2):
        engine.loss(compiled(X).square().mean()).backward()
        seen.append((int(model.frac.stage.fw), int(model.frac.stage.bw)))
        engine.end_epoch()
    assert seen == [(2, 6), (4, 6)]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch.isfinite(model.expert.weight.grad).all()


def test_cp_is_over_gated_and_scheduled_ops_and_agrees_with_the_cost_of_the_run() -> None:
    model = rewritten("fractrain", targets=(3.0,))
    engine = Engine(model)
    engine.loss(model(X).square().mean())
    spent = full = 0.0
    for op, cost in costed(model.graph_module, model.frac_config):
        if op.precision.mode == "scheduled":
            spent += sum(cost.spent(Precision(4, 6), 6))
        if op.precision.mode == "gated":
            share = model.cost.choice[op.block or ""].detach().mean(0)
            spent += sum(
                float(each) * sum(cost.spent(o, 6)) for each, o in zip(share, model.frac_config.options, strict=True)
            )
        full += sum(cost.macs) if op.precision.mode in ("gated", "scheduled") else 0
    assert float(model.cost.cp) == pytest.approx(spent / full, rel=1e-6)
    engine.end_epoch()
    priced = run_cost(StepPrices(model, len(X)), engine.ledger.rows)
    assert priced.steered.macs == pytest.approx(len(X) * spent, rel=1e-6)


def test_a_block_feels_the_same_push_whatever_share_of_cp_is_scheduled() -> None:
    model = rewritten("dfq", targets=(3.0,), gate=GateConfig(control="sign"))
    engine = Engine(model)
    model(X)
    (choice,) = model.cost.choice.values()
    (push,) = torch.autograd.grad(engine.loss(torch.zeros(())), choice)
    costs = torch.tensor([sum(option.shares(6)) for option in model.frac_config.options])
    expected = model.frac_config.gate.beta * costs / costs[1:].mean()
    assert 0 < model.gated_share < 1
    torch.testing.assert_close(push.abs(), expected.expand(4, -1), rtol=1e-5, atol=0)


def test_the_table_says_at_which_precision_and_why() -> None:
    printed = " ".join(str(summarize(rewritten("fractrain", targets=(2.2, 3.0)), ops=True)).split())
    assert "scheduled, since no gate can choose: FW-2/BW-6 / FW-4/BW-6 at these targets" in printed
    assert "scheduled: its samples are in mixed order" in printed and "scheduled: all samples share it" in printed


def test_skipped_samples_that_are_left_out_give_the_same_numbers() -> None:
    outputs = []
    for skipping in ("computed", "left-out"):
        model = rewritten("dfq", run=RunConfig(skipping=skipping))
        torch.manual_seed(1)
        outputs.append(model(X))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-5)  # products are summed in another order


def test_an_adjacency_matrix_behind_a_contraction_is_no_first_contraction() -> None:
    args = (torch.randn(2, 5, 6), torch.rand(2, 5, 5))
    model = fractrainify(GraphNetwork(), config=FracConfig(), example_inputs=args, check=False)
    first = [op.name for op in model.ops if op.precision.reason == "first contraction"]
    assert first == ["layers.0"]
    assert all(facts(node).batch is not None for node in model.graph.nodes if facts(node).op is not None)
