"""The push of the cost term: its sign, and that it does not know batch size, depth or options (ALGORITHM 5)."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fractrain_fx.config import AUTHORS_OPTIONS, COMPACT_OPTIONS, DFQ_OPTIONS, Control, FracConfig, GateConfig
from fractrain_fx.config.precision import FULL, SKIP, Precision
from fractrain_fx.engine import CostTerm, Engine
from fractrain_fx.engine.cost_term import authors_beta
from fractrain_fx.nn.cost import OpCost
from tests.build import paper
from tests.engine.fake import FakeModel

BETA = 3e-4
SIGN = GateConfig(beta=BETA, control="sign")


def test_option_shares_are_those_of_the_paper() -> None:
    assert SKIP.mean_share(6) == 0
    assert FULL.mean_share(32) == 1
    assert Precision(8, 8).mean_share(8) == pytest.approx(0.0625)
    assert Precision(3, 6).mean_share(4) == pytest.approx(0.01758, abs=1e-5)
    assert Precision(6, 12).mean_share(4) == pytest.approx(0.04688, abs=1e-5)


def pushes(model: FakeModel, batch: int, accumulate: int = 1) -> torch.Tensor:
    """Gradient of an optimizer step's loss in each choice: [samples of the step, blocks, options]."""
    engine = Engine(model, accumulate=accumulate)
    parts = []
    for _ in range(accumulate):
        model(batch)
        (engine.loss(torch.zeros(())) / accumulate).backward()
        parts.append(torch.stack(model.pushes(), dim=1))
    return torch.cat(parts)


@pytest.mark.parametrize("batch", [1, 32, 128])
@pytest.mark.parametrize("blocks", [1, 6, 18])
@pytest.mark.parametrize("options", [DFQ_OPTIONS, COMPACT_OPTIONS])
def test_the_mean_option_in_a_mean_block_costs_beta(batch: int, blocks: int, options: tuple[Precision, ...]) -> None:
    config = FracConfig(options=options, targets=(0.1,), gate=SIGN)
    push = pushes(FakeModel(config, (7,) * blocks), batch)
    # The options that run average to the mean share, so their pushes average to beta; float32 sums over the batch.
    assert torch.allclose(push[..., 1:].mean(-1), torch.tensor(BETA), rtol=1e-4)
    assert (push[..., 0] == 0).all()


def test_a_block_pushes_by_its_size() -> None:
    push = pushes(FakeModel(FracConfig(targets=(0.1,)), (10, 30)), 4)
    assert torch.allclose(push[:, 1], 3 * push[:, 0])


def test_slu_feels_the_same_push() -> None:
    model = FakeModel(FracConfig(method="slu", targets=(1,), gate=SIGN), (7, 7))
    engine = Engine(model)
    model(8, k=1)
    engine.loss(torch.zeros(())).backward()
    assert torch.allclose(model.pushes()[0], torch.tensor([0.0, BETA]).expand(8, 2), rtol=1e-4)


@pytest.mark.parametrize("control", ["sign", "multiplier"])
def test_accumulated_batches_push_like_one_large_batch(control: Control) -> None:
    config = FracConfig(targets=(0.1,), gate=GateConfig(control=control))
    whole, parts = pushes(FakeModel(config), 32), pushes(FakeModel(config), 8, accumulate=4)
    assert torch.allclose(whole, parts, rtol=1e-5)


def sign(cost_term: CostTerm, cp: float, target: float, samples: int = 4) -> float:
    term = cost_term.of_batch(torch.tensor(cp, requires_grad=True), target, samples, 2)
    return float(term.detach().sign())


def test_sign_follows_target_and_dead_band() -> None:
    plain = CostTerm(SIGN, DFQ_OPTIONS, 6)
    assert [sign(plain, cp, 3.0) for cp in (0.02, 0.0301, 0.05)] == [-1, 1, 1]
    band = CostTerm(replace(SIGN, dead_band=1.0), DFQ_OPTIONS, 6)
    assert [sign(band, cp, 3.0) for cp in (0.02, 0.0301, 0.0399, 0.0401)] == [-1, 0, 0, 1]


def test_at_the_target_the_sign_is_positive() -> None:
    assert sign(CostTerm(SIGN, DFQ_OPTIONS, 6), 0.5, 50.0) == 1


def test_under_accumulation_the_sign_is_that_of_the_mean_so_far() -> None:
    cost_term = CostTerm(SIGN, DFQ_OPTIONS, 6)
    cost_term.accumulate = 2
    assert sign(cost_term, 0.05, 3.0, samples=6) == 1
    assert sign(cost_term, 0.01, 3.0, samples=2) == 1  # mean of the step: 4 %
    assert sign(cost_term, 0.01, 3.0, samples=2) == -1  # a new optimizer step


def strengths(control: Control, cps: Sequence[float], target: float = 2.0, **gains: Any) -> list[float]:
    """The multiple of beta in each of several steps."""
    gate = GateConfig(beta=BETA, control=control, **gains)
    cost_term, plain = CostTerm(gate, DFQ_OPTIONS, 6), CostTerm(SIGN, DFQ_OPTIONS, 6)
    found = []
    for cp in cps:
        terms = [each.of_batch(torch.tensor(cp), target, 4, 2).abs() for each in (cost_term, plain)]
        found.append(float(terms[0] / terms[1]))
    return found


def test_a_multiplier_has_no_bound_and_may_push_the_other_way() -> None:
    assert strengths("multiplier", [0.04] * 9, gain=0.1, integral_gain=0.25)[8] == pytest.approx(2.1, rel=1e-4)
    cost_term = CostTerm(GateConfig(control="multiplier", gain=0.1, integral_gain=0.25), DFQ_OPTIONS, 6)
    signs = [sign(cost_term, cp, 2.0) for cp in (0.01, 0.01, 0.021, 0.04, 0.04)]
    assert signs == [-1, -1, -1, -1, 1]  # cp is above the target from the third step on


def test_a_dead_band_holds_the_integral() -> None:
    gate = GateConfig(control="multiplier", dead_band=1.0, gain=1, integral_gain=0.5)
    cost_term = CostTerm(gate, DFQ_OPTIONS, 6)
    for cp in (0.025, 0.029):
        assert sign(cost_term, cp, 2.0) == 0
    cost_term.of_batch(torch.tensor(0.04), 2.0, 4, 2)
    assert cost_term.state_dict() == {"integral": pytest.approx(0.25)}  # half of 1 % over a target of 2 %


def test_under_accumulation_the_integral_moves_once_an_optimizer_step_by_the_mean_of_its_batches() -> None:
    whole = CostTerm(GateConfig(control="multiplier"), DFQ_OPTIONS, 6)
    parts = CostTerm(GateConfig(control="multiplier"), DFQ_OPTIONS, 6)
    parts.accumulate = 2
    for first, second in ((0.01, 0.05), (0.02, 0.04), (0.01, 0.02)):
        whole.of_batch(torch.tensor((first + second) / 2), 2.0, 8, 2)
        parts.of_batch(torch.tensor(first), 2.0, 4, 2)
        parts.of_batch(torch.tensor(second), 2.0, 4, 2)
    assert parts.state_dict()["integral"] == pytest.approx(whole.state_dict()["integral"], rel=1e-5)
    # A step that the loop ends early counts by the batches that it had.
    parts.of_batch(torch.tensor(0.05), 2.0, 4, 2)
    whole.of_batch(torch.tensor(0.05), 2.0, 4, 2)
    parts.start_step()
    parts.start_step()
    assert parts.state_dict()["integral"] == pytest.approx(whole.state_dict()["integral"], rel=1e-5)


def test_a_run_that_goes_on_elsewhere_has_the_same_strength_bit_for_bit() -> None:
    config = paper(targets=(2.0, 3.0), gate=GateConfig(control="multiplier"))

    def steps(engine: Engine, model: FakeModel) -> list[float]:
        found = []
        for k in (5, 1, 6):
            model(4, k=k)
            found.append(float(engine.loss(torch.zeros(())).detach()))
        return found

    model = FakeModel(config)
    engine = Engine(model)
    steps(engine, model)
    state = json.loads(json.dumps(engine.state_dict()))
    other = FakeModel(config)
    resumed = Engine(other)
    resumed.load_state_dict(state)
    assert steps(resumed, other) == steps(engine, model)
    fresh = Engine(other)
    assert steps(fresh, other) != steps(resumed, other)


def test_the_strength_of_the_authors_is_per_full_precision_cost() -> None:
    options = AUTHORS_OPTIONS
    gate = replace(SIGN, beta=authors_beta(options, 4))
    push = pushes(FakeModel(FracConfig(options=options, weight_bits=4, targets=(0.1,), gate=gate), (7, 7)), 4)
    for k, option in enumerate(options):
        paths = sum(OpCost((1, 1, 1)).spent(option, 4))  # FW + EB + GC, each a share of its own product
        assert torch.allclose(push[..., k], torch.tensor(1e-3 * paths), rtol=1e-4)
