"""The push of the cost term: its sign, and that it does not know batch size, depth or options (ALGORITHM 5)."""

import pytest
import torch

from fractrain_fx.config import COMPACT_OPTIONS, DFQ_OPTIONS, FracConfig, GateConfig
from fractrain_fx.engine import CostController, Engine
from fractrain_fx.engine.controller import option_share
from fractrain_fx.precision import FULL, SKIP, Precision
from tests.engine.fake import FakeModel

BETA = 3e-4


def test_option_shares_are_those_of_the_paper() -> None:
    assert option_share(SKIP, 6) == 0
    assert option_share(FULL, 32) == 1
    assert option_share(Precision(8, 8), 8) == pytest.approx(0.0625)
    assert option_share(Precision(3, 6), 4) == pytest.approx(0.01758, abs=1e-5)
    assert option_share(Precision(6, 12), 4) == pytest.approx(0.04688, abs=1e-5)


def pushes(model: FakeModel, batch: int, accumulate: int = 1) -> torch.Tensor:
    """Gradient of an optimizer step's loss in each choice: [samples of the step, blocks, options]."""
    engine = Engine(model, accumulate=accumulate)
    parts = []
    for _ in range(accumulate):
        model(batch)
        (engine.loss(torch.zeros(())) / accumulate).backward()
        parts.append(torch.stack([choice.grad for choice in model.cost.choice.values()], dim=1))
    return torch.cat(parts)


@pytest.mark.parametrize("batch", [1, 32, 128])
@pytest.mark.parametrize("blocks", [1, 6, 18])
@pytest.mark.parametrize("options", [DFQ_OPTIONS, COMPACT_OPTIONS])
def test_the_mean_option_in_a_mean_block_costs_beta(batch: int, blocks: int, options: tuple[Precision, ...]) -> None:
    config = FracConfig(options=options, targets=(0.1,), gate=GateConfig(beta=BETA))
    push = pushes(FakeModel(config, (7,) * blocks), batch)
    # The options that run average to the mean share, so their pushes average to beta; float32 sums over the batch.
    assert torch.allclose(push[..., 1:].mean(-1), torch.tensor(BETA), rtol=1e-4)
    assert (push[..., 0] == 0).all()


def test_a_block_pushes_by_its_size() -> None:
    push = pushes(FakeModel(FracConfig(targets=(0.1,)), (10, 30)), 4)
    assert torch.allclose(push[:, 1], 3 * push[:, 0])


def test_slu_feels_the_same_push() -> None:
    model = FakeModel(FracConfig(method="slu", targets=(1,), gate=GateConfig(beta=BETA)), (7, 7))
    engine = Engine(model)
    model(8, k=1)
    engine.loss(torch.zeros(())).backward()
    push = model.cost.choice["block0"].grad
    assert torch.allclose(push, torch.tensor([0.0, BETA]).expand(8, 2), rtol=1e-4)


def test_accumulated_batches_push_like_one_large_batch() -> None:
    whole = pushes(FakeModel(FracConfig(targets=(0.1,))), 32)
    parts = pushes(FakeModel(FracConfig(targets=(0.1,))), 8, accumulate=4)
    assert torch.allclose(whole, parts, rtol=1e-5)


def sign(controller: CostController, cp: float, target: float, samples: int = 4) -> float:
    term = controller.term(torch.tensor(cp, requires_grad=True), target, samples, 2)
    return float(term.detach().sign())


def test_sign_follows_target_and_dead_band() -> None:
    plain = CostController(BETA, 0.0, DFQ_OPTIONS, 6)
    assert [sign(plain, cp, 3.0) for cp in (0.02, 0.0301, 0.05)] == [-1, 1, 1]
    band = CostController(BETA, 1.0, DFQ_OPTIONS, 6)
    assert [sign(band, cp, 3.0) for cp in (0.02, 0.0301, 0.0399, 0.0401)] == [-1, 0, 0, 1]


def test_at_the_target_the_sign_is_positive() -> None:
    assert sign(CostController(BETA, 0.0, DFQ_OPTIONS, 6), 0.5, 50.0) == 1


def test_under_accumulation_the_sign_is_that_of_the_mean_so_far() -> None:
    controller = CostController(BETA, 0.0, DFQ_OPTIONS, 6, accumulate=2)
    assert sign(controller, 0.05, 3.0, samples=6) == 1
    assert sign(controller, 0.01, 3.0, samples=2) == 1  # mean of the step: 4 %
    assert sign(controller, 0.01, 3.0, samples=2) == -1  # a new optimizer step
