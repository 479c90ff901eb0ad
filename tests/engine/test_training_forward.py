"""The engine counts the forward that trains, whatever the model runs between it and the loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fractrain_fx import Engine, FracModel
from fractrain_fx.engine.rows import EpochRow
from tests.plain import rewritten

Run = Callable[[Tensor], Tensor]


def without_gradients(model: FracModel, run: Run) -> None:
    with torch.no_grad():
        run(torch.rand(3, 3, 8, 8))


def in_inference_mode(model: FracModel, run: Run) -> None:
    with torch.inference_mode():
        run(torch.rand(3, 3, 8, 8))


def evaluated(model: FracModel, run: Run) -> None:
    model.eval()
    run(torch.rand(3, 3, 8, 8))
    model.train()


def step(*, compiled: bool, later: Callable[[FracModel, Run], None] | None) -> tuple[list[Tensor], EpochRow]:
    """The gradients of a step's cost term in the gates, and the row of its epoch."""
    model = rewritten("fractrain")
    engine = Engine(model, epochs=1)
    run: Run = torch.compile(model, backend="eager") if compiled else model
    torch.manual_seed(0)
    output = run(torch.rand(8, 3, 8, 8))
    if later is not None:
        later(model, run)
    task = output.square().mean()
    (engine.loss(task) - task).backward()
    engine.end_epoch()
    gates = [p.grad for name, p in model.named_parameters() if name.startswith("frac.") and p.grad is not None]
    assert gates and any(each.any() for each in gates)
    return gates, engine.ledger.rows[0]


@pytest.mark.parametrize(
    ("compiled", "later"),
    [
        (False, without_gradients),
        (False, in_inference_mode),
        (False, evaluated),
        pytest.param(True, without_gradients, marks=pytest.mark.long),
    ],
)
@pytest.mark.filterwarnings("error:the model ran")
def test_a_later_forward_that_trains_nothing_changes_neither_gradients_nor_the_ledger(
    compiled: bool, later: Callable[[FracModel, Run], None]
) -> None:
    alone, row = step(compiled=compiled, later=None)
    gates, found = step(compiled=compiled, later=later)
    assert found == row and row.samples == 8
    assert all(map(torch.equal, gates, alone))


def test_cost_is_that_of_the_last_forward_whichever_it_was() -> None:
    model = rewritten()
    model(torch.rand(8, 3, 8, 8))
    without_gradients(model, model)
    assert (model.batch, model.training_forward.batch) == (3, 8)


def test_losses_without_gradients_count_and_those_of_evaluations_do_not() -> None:
    model = rewritten()
    engine = Engine(model, epochs=1)
    engine.loss(model(torch.rand(8, 3, 8, 8)).square().mean())
    with torch.no_grad():
        engine.loss(model(torch.rand(3, 3, 8, 8)).square().mean())
    model.eval()
    with torch.no_grad():
        engine.loss(model(torch.rand(2, 3, 8, 8)).square().mean())
    with pytest.warns(UserWarning, match="evaluation mode"):
        engine.loss(model(torch.rand(2, 3, 8, 8)).square().mean())
    engine.end_epoch()
    assert engine.ledger.samples == 11
