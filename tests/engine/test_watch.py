"""Loops that train something else than they should are told which line to change; sound loops are told nothing."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fractrain_fx import Engine, FracModel, GateConfig, Precision
from fractrain_fx.errors import ConfigError, CostTermError
from fractrain_fx.nn.bits import stage_of
from tests.plain import rewrite, rewritten
from tests.training.tiny import Plain

Optimizer = torch.optim.Optimizer


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(count):
        yield torch.rand(4, 3, 8, 8), torch.randint(10, (4,))


def train(
    model: FracModel, optimizer: Optimizer, engine: Engine | None = None, *, epochs: int = 2, steps: int = 4
) -> None:
    """The loop of the README."""
    engine = engine or Engine(model)
    for _ in range(epochs):
        for x, y in batches(steps):
            optimizer.zero_grad()
            engine.loss(F.cross_entropy(model(x), y)).backward()
            optimizer.step()
        engine.end_epoch()


@pytest.fixture
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.filterwarnings("ignore:the gates never learn")
@pytest.mark.parametrize("steps", [1, 5])
def test_an_optimizer_from_before_the_rewrite_is_named(steps: int) -> None:
    original = Plain()
    optimizer = torch.optim.SGD(original.parameters(), lr=0.1)
    with pytest.raises(CostTermError, match=r"gates never learn.*built before fractrainify.*model\.param_groups\(\)"):
        train(rewrite(original), optimizer, steps=steps, epochs=3)


def test_gates_that_stay_are_a_warning_before_the_epoch_has_ended() -> None:
    original = Plain()
    optimizer = torch.optim.Adam(original.parameters(), lr=0.1)
    model = rewrite(original)
    engine = Engine(model)
    with pytest.warns(UserWarning, match="gates never learn"):
        for x, y in batches(4):
            engine.loss(F.cross_entropy(model(x), y)).backward()
            optimizer.step()


@pytest.mark.parametrize("mistake", ["result thrown away", "backward on the task's loss"])
def test_a_cost_term_that_backward_never_reaches_names_the_line(mistake: str) -> None:
    model = rewritten()
    engine, optimizer = Engine(model), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CostTermError, match=r"test_watch\.py:\d+.*for 2 batches.*loss = engine\.loss\(loss\)"):
        for x, y in batches(5):
            loss = F.cross_entropy(model(x), y)
            if mistake == "result thrown away":
                engine.loss(loss)
            else:
                total = engine.loss(loss)
                assert total.requires_grad
            loss.backward()
            optimizer.step()


def test_it_is_found_at_the_first_end_of_an_epoch_of_one_step() -> None:
    model = rewritten()
    engine, optimizer = Engine(model), torch.optim.SGD(model.parameters(), lr=0.1)
    ((x, y),) = batches(1)
    loss = F.cross_entropy(model(x), y)
    engine.loss(loss)
    loss.backward()
    optimizer.step()
    with pytest.raises(CostTermError, match="trains without the cost term"):
        engine.end_epoch()


@pytest.mark.parametrize("method", ["dfq", "static"])
def test_parameters_that_the_optimizer_misses_are_named(method: str) -> None:
    model = rewritten(method)
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if not name.startswith("stem")], lr=0.1)
    with pytest.warns(UserWarning, match=r"2 of \d+ parameters get gradients.*stem\.weight, stem\.bias\. Build"):
        train(model, optimizer)


def test_an_optimizer_of_another_model_is_found_in_time() -> None:
    model = rewritten()
    optimizer = torch.optim.SGD(Plain().parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"no parameter of the model has changed in 60 batches"):
        train(model, optimizer, steps=30)


class Behind(Optimizer):
    """Writes to ``.data``, which raises no version."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad.data, alpha=-0.1)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "foreach": lambda p: torch.optim.Adam(p, lr=1e-3, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "lr 0": lambda p: torch.optim.SGD(p, lr=0.0),
    "behind torch's back": Behind,
}


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("method", ["dfq", "static"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sound_loops_are_told_nothing(method: str, name: str) -> None:
    model = rewritten(method)
    train(model, OPTIMIZERS[name](model.parameters()))


@pytest.mark.usefixtures("silent")
def test_gates_of_an_optimizer_that_starts_later_are_no_error_where_the_engine_does_not_watch() -> None:
    original = Plain()
    optimizer = torch.optim.SGD(original.parameters(), lr=0.1)
    model = rewrite(original)
    train(model, optimizer, Engine(model, watch=False))


@pytest.mark.usefixtures("silent")
def test_frozen_parts_and_unused_ones_are_not_missed() -> None:
    original = Plain()
    original.unused = nn.Linear(3, 3)
    model = rewrite(original)
    model.stem.requires_grad_(False)
    train(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("told", [True, False])
def test_accumulated_gradients_are_no_missing_backward(told: bool) -> None:
    """A loop that tells the engine and divides, and one that adds losses up and calls backward once."""
    model = rewritten()
    engine, optimizer = Engine(model, accumulate=4 if told else 1), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        losses = []
        for x, y in batches(4):
            loss = engine.loss(F.cross_entropy(model(x), y))
            losses.append(loss)
            if told:
                (loss / 4).backward()
        if not told:
            sum(losses).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    engine.end_epoch()


@pytest.mark.usefixtures("silent")
def test_steps_that_a_scaler_skips_are_no_alarm() -> None:
    model = rewritten()
    engine, optimizer = Engine(model), torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38, growth_interval=1000)
    for epoch in range(3):
        for x, y in batches(3):
            optimizer.zero_grad()
            scaler.scale(engine.loss(1e3 * F.cross_entropy(model(x), y))).backward()
            scaler.step(optimizer)
            scaler.update(new_scale=1.0 if epoch == 1 else None)
        engine.end_epoch()
    assert scaler.get_scale() == 1


@pytest.mark.usefixtures("silent")
def test_an_epoch_without_training_is_no_alarm() -> None:
    model = rewritten()
    engine = Engine(model)
    for x, y in batches(3):
        engine.loss(F.cross_entropy(model(x), y))
    engine.end_epoch()
    with torch.no_grad():
        for x, y in batches(3):
            engine.loss(F.cross_entropy(model(x), y))
    engine.end_epoch()


@pytest.mark.parametrize("inside", [False, True])
def test_a_loss_that_is_divided_before_the_cost_term_is_told_of(inside: bool) -> None:
    model = rewritten()
    engine = Engine(model, accumulate=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in batches(4):
            loss = F.cross_entropy(model(x), y)
            (engine.loss(loss / 4) if inside else engine.loss(loss) / 4).backward()
    assert len([one for one in caught if "divide what engine.loss gives" in str(one.message)]) == inside


def test_gates_that_square_gradients_refuse_a_scaled_loss() -> None:
    model = rewritten(gate=GateConfig(gradient="fisher"))
    engine = Engine(model, accumulate=4)
    x, y = next(batches(1))
    for scale in (1.0, 0.25):
        (scale * engine.loss(F.cross_entropy(model(x), y))).backward()
    with pytest.raises(ConfigError, match=r"the loss was multiplied by 1024 before backward.*bfloat16"):
        (1024 * engine.loss(F.cross_entropy(model(x), y))).backward()
    (1024 * Engine(model, watch=False).loss(F.cross_entropy(model(x), y))).backward()
    # The loop says that it multiplies by the number of processes what each adds of the term.
    (2 * Engine(model).loss(F.cross_entropy(model(x), y) / 2, weight=1 / 2)).backward()
    model = rewritten()
    (1024 * Engine(model).loss(F.cross_entropy(model(x), y))).backward()


def test_two_runs_before_one_loss_are_told_once() -> None:
    model = rewritten()
    engine = Engine(model)
    x, y = next(batches(1))
    with pytest.warns(UserWarning, match="ran 2 times before engine.loss") as told:
        for _ in range(2):
            engine.loss(F.cross_entropy(model(x), y) + F.cross_entropy(model(x), y)).backward()
    assert len(told) == 1
    with torch.no_grad():
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Engine(model).loss(F.cross_entropy(model(x), y)).backward()


@pytest.mark.parametrize("method", ["dfq", "pfq"])
def test_two_losses_of_one_run_are_told_once(method: str) -> None:
    model = rewritten(method)
    engine = Engine(model, epochs=2)
    x, y = next(batches(1))
    with pytest.warns(UserWarning, match="engine.loss was called again for the same run of the model") as told:
        for _ in range(2):
            outputs = model(x)
            engine.loss(F.cross_entropy(outputs, y)).backward(retain_graph=True)
            engine.loss(outputs.square().mean()).backward()
    assert len(told) == 1
    engine.end_epoch()
    assert engine.ledger.rows[-1].samples == 4 * len(x)  # as the warning says


def test_an_engine_that_has_seen_a_batch_can_be_copied() -> None:
    model = rewritten()
    engine = Engine(model)
    x, y = next(batches(1))
    engine.loss(F.cross_entropy(model(x), y)).backward()
    assert copy.deepcopy(engine).state_dict() == engine.state_dict()


def test_an_empty_batch_leaves_the_steering_as_it_is() -> None:
    model = rewritten()
    engine = Engine(model)
    x, y = next(batches(1))
    engine.loss(model(x[:0]).sum()).backward()
    engine.loss(F.cross_entropy(model(x), y)).backward()
    assert engine.end_epoch() is None
    assert engine.ledger.rows[-1].samples == len(x) and 0 <= engine.ledger.rows[-1].cp < 1


Called = Callable[[FracModel], Callable[[Tensor], Tensor]]


def compiled_in_place(model: FracModel) -> FracModel:
    model.compile(backend="eager")
    return model


CALLED: list[Any] = [
    pytest.param(lambda model: model, id="eager"),
    pytest.param(lambda model: torch.compile(model, backend="eager"), id="compiled", marks=pytest.mark.long),
    pytest.param(compiled_in_place, id="compiled in place", marks=pytest.mark.long),
]


@pytest.mark.parametrize("called", CALLED)
def test_a_checkpoint_of_another_stage_does_not_move_the_engines(called: Called) -> None:
    last, model = rewritten("pfq"), rewritten("pfq")
    x, y = next(batches(1))
    last(x)
    last.set_precision(Precision(8, 8))
    engine, run = Engine(model), called(model)
    run(x)
    cost = model.cost.cp.clone()
    model.load_state_dict(last.state_dict())
    assert stage_of(model) == Precision(8, 8)
    model.eval()
    with torch.no_grad():
        run(x)
    assert stage_of(model) == Precision(8, 8)  # as the checkpoint was trained
    assert model.stage is not None and model.stage.level == Precision(8, 8)
    model.train()
    engine.loss(F.cross_entropy(run(x), y)).backward()
    assert stage_of(model) == Precision(3, 6) == engine.level and torch.equal(model.cost.cp, cost)
    model.load_state_dict(last.state_dict())
    model.set_precision(Precision(6, 8))
    run(x)
    assert stage_of(model) == Precision(6, 8)


@pytest.mark.parametrize("called", CALLED)
def test_the_first_step_with_a_frozen_layer_costs_what_it_trains(called: Called) -> None:
    model = rewritten("static")
    run, (x, _) = called(model), next(batches(1))
    run(x)
    for parameter in model.block.parameters():
        parameter.requires_grad_(False)
    run(x)
    first = model.cost.cp_total.clone()
    run(x)
    assert torch.equal(first, model.cost.cp_total)
