"""Costs are those of the parameters that are trained now, whenever they were frozen."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from fractrain_fx import Engine, FracModel, Pin, Precision, summarize
from tests.build import paper
from tests.build import rewritten as build_rewritten
from tests.models import build, thinned

CASES = ["tied_weights", "multihead_attention", "gpt2"]
METHODS: dict[str, dict[str, Any]] = {
    "dfq": {"method": "dfq"},
    "pfq": {"method": "pfq"},
    "pinned": {"method": "dfq", "pins": (Pin("last", Precision(8, 8)),)},
    "float": {"method": "float"},
}


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message="with the parameters that are frozen now")
        yield


def half(model: nn.Module) -> None:
    """Freeze the first half of a model's parameters."""
    named = [p for name, p in model.named_parameters() if not name.startswith("frac.")]
    for parameter in named[: len(named) // 2]:
        parameter.requires_grad_(False)


def weights(model: nn.Module) -> None:
    """Freeze every matrix."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and not name.startswith("frac."):
            parameter.requires_grad_(False)


def rewritten(name: str, change: Callable[[nn.Module], None] | None = None, **config: Any) -> tuple[FracModel, Any]:
    case = build(name)
    if change is not None:
        change(case.model)
    return build_rewritten(case, config=paper(**config)).train(), case


def numbers(model: FracModel) -> dict[str, Any]:
    tables = {name: x.clone() for name, x in model.frac.cost.named_buffers()}
    return {"ops": [op.training_macs for op in model.ops], "reach": model.reachable} | tables


def decisions(model: FracModel) -> list[str]:
    return [op.precision.words for op in model.ops]


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(torch.equal(x, b[key]) if isinstance(x, Tensor) else x == b[key] for key, x in a.items())


@pytest.mark.parametrize("change", [half, weights])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", thinned(CASES, 3))
def test_freezing_after_the_rewrite_costs_what_freezing_before_it_costs(
    name: str, method: str, change: Callable[[nn.Module], None]
) -> None:
    before, _ = rewritten(name, change, **METHODS[method])
    after, case = rewritten(name, **METHODS[method])
    whole = numbers(after)
    change(after)
    after(*case.args, **case.keywords)
    assert [op.training_macs for op in after.ops] == [op.training_macs for op in before.ops]
    assert not same(numbers(after), whole)
    # A product of activations is float where nothing is trained before it: precisions are decided at the rewrite.
    assert same(numbers(after), numbers(before)) or decisions(after) != decisions(before)
    for parameter in after.parameters():
        parameter.requires_grad_(True)
    after(*case.args, **case.keywords)
    assert same(numbers(after), whole)


def test_the_cost_of_the_very_next_step_the_summary_and_the_ledger_follow() -> None:
    model, case = rewritten("tied_weights", method="static", precision=Precision(8, 8))
    model(*case.args, **case.keywords)
    assert model.trained_share == 1 and float(model.cost.gc) > 0
    weights(model)
    macs = {op.name: op.training_macs for op in summarize(model).ops}
    assert all(gc == 0 for _, _, gc in macs.values()) and 0.3 < model.trained_share < 0.7
    engine = Engine(model)
    output = model(*case.args, **case.keywords)
    assert float(model.cost.gc) == 0
    engine.loss(next(iter(output.values()) if isinstance(output, dict) else iter([output])).square().mean()).backward()
    engine.end_epoch()
    row = engine.ledger.rows[0]
    assert row.relative_macs == pytest.approx(model.trained_share)
    assert engine.ledger.total_macs == pytest.approx(3 * model.macs * row.cp_total * row.samples * model.trained_share)


def test_a_copy_and_a_loaded_checkpoint_cost_what_they_train() -> None:
    model, _ = rewritten("tied_weights", method="dfq")
    state = copy.deepcopy(model.state_dict())
    half(model)
    frozen = numbers(copy.deepcopy(model))
    assert same(frozen, numbers(model))
    model.load_state_dict(state)  # holds the tables of a model with nothing frozen
    assert same(frozen, numbers(model))


def test_targets_out_of_reach_are_told() -> None:
    model, case = rewritten("multihead_attention", method="dfq", targets=(5.8,))
    weights(model)
    with pytest.warns(UserWarning, match=r"gates reach a cp of .* not the target\(s\) 5.8 %"):
        model(*case.args, **case.keywords)


@pytest.mark.long
def test_a_compiled_model_follows_without_a_new_compilation_of_costs() -> None:
    model, case = rewritten("multihead_attention", method="static")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    compiled(*case.args).square().mean().backward()
    before = float(model.cost.cp_total)
    weights(model)
    assert model.cost is not None  # Engine.loss reads it after each forward
    compiled(*case.args).square().mean().backward()
    after = float(model.cost.cp_total)
    assert after != before and counter.frame_count <= 2  # gradients are others, so torch compiles those anew
    model(*case.args)
    assert float(model.cost.cp_total) == pytest.approx(after)
