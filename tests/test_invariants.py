"""What must always hold (docs/architecture.md, "Invariants"), on real models of every kind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fractrain_fx import Engine, FracConfig, FracModel, fractrainify
from fractrain_fx.capture import resize_batch
from tests.models import HOME_MADE, HUGGING_FACE, TIMM, Case, build

NAMES = [*TIMM, *HUGGING_FACE, *HOME_MADE]


def rewrite(case: Case, method: str, model: nn.Module | None = None) -> FracModel:
    config = FracConfig(method=method)  # type: ignore[arg-type]
    model = case.model if model is None else model
    return fractrainify(model, config=config, example_inputs=case.args, example_kwargs=case.keywords)


def floats(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def objective(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    return loss if loss is not None else sum((leaf.float().sum() for leaf in floats(output)), torch.zeros(()))


def step(model: nn.Module, case: Case, seed: int) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Outputs, gradients and buffers of one training step with a seed."""
    model.train()
    model.zero_grad()
    torch.manual_seed(seed)
    output = model(*case.args, **case.keywords)
    objective(output).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    buffers = {name: b.clone() for name, b in model.named_buffers() if not name.startswith("frac.")}
    return [leaf.detach() for leaf in floats(output)], gradients, buffers


def assert_same(left: list[Tensor] | dict[str, Tensor], right: list[Tensor] | dict[str, Tensor]) -> None:
    if isinstance(left, dict) and isinstance(right, dict):
        assert left.keys() == right.keys()
        left, right = list(left.values()), list(right.values())
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_method_float_equals_the_original_bit_for_bit(name: str) -> None:
    case = build(name)
    original = copy.deepcopy(case.model)
    rewritten = rewrite(case, "float")
    for mine, theirs in zip(step(rewritten, case, 7), step(original, case, 7), strict=True):
        assert_same(mine, theirs)
    rewritten.eval(), original.eval()
    larger = resize_batch({"args": case.args, "kwargs": case.keywords}, 3)
    with torch.no_grad():
        assert_same(
            floats(rewritten(*larger["args"], **larger["kwargs"])),
            floats(original(*larger["args"], **larger["kwargs"])),
        )


@pytest.mark.parametrize("name", NAMES)
def test_names_ties_class_and_weights_survive_and_the_result_trains_copies_and_reloads(
    name: str, tmp_path: Any
) -> None:
    case = build(name)
    plain, checkpoint = copy.deepcopy(case.model), case.model.state_dict()
    had_gradient = step(plain, case, 1)[1].keys()
    rewritten = rewrite(case, "fractrain")

    # 2: every key of the original is there, the rest lies under frac.*, an original checkpoint loads as it is.
    keys = rewritten.state_dict().keys()
    assert checkpoint.keys() <= keys
    assert all(key.startswith("frac.") for key in keys - checkpoint.keys())
    tied = lambda module: {n: p.data_ptr() for n, p in module.named_parameters(remove_duplicate=False)}  # noqa: E731
    groups = lambda pointers: {frozenset(n for n in pointers if pointers[n] == at) for at in pointers.values()}  # noqa: E731
    original_pointers = tied(case.model)
    assert groups({n: p for n, p in tied(rewritten).items() if n in original_pointers}) == groups(original_pointers)
    rewritten.load_state_dict(plain.state_dict())
    assert type(rewritten.restore()) is type(plain)
    assert [n for n, _ in rewritten.restore().named_parameters()] == [n for n, _ in plain.named_parameters()]

    # Every parameter that had a gradient still has a finite one, and so has every gate that was asked.
    engine = Engine(rewritten)
    rewritten.train()
    torch.manual_seed(1)
    engine.loss(objective(rewritten(*case.args, **case.keywords))).backward()
    gradients = {n: p.grad for n, p in rewritten.named_parameters() if p.grad is not None}
    assert had_gradient <= gradients.keys()
    assert {n for n, _ in rewritten.named_parameters() if n.startswith("frac.")} <= gradients.keys()
    assert all(gradient.isfinite().all() for gradient in gradients.values())

    # 3: the graph lints, prints, copies, saves and is rebuilt.
    rewritten.graph.lint()
    assert "frac" in rewritten.print_readable(print_output=False)
    rewritten.eval()
    with torch.no_grad():
        expected = floats(rewritten(*case.args, **case.keywords))
        twin = copy.deepcopy(rewritten)
        assert_same(floats(twin(*case.args, **case.keywords)), expected)
        assert not {p.data_ptr() for p in twin.parameters()} & {p.data_ptr() for p in rewritten.parameters()}
        rewritten.save_pretrained(tmp_path)
        rebuilt = FracModel.from_pretrained(tmp_path, model=plain).eval()
        assert_same(floats(rebuilt(*case.args, **case.keywords)), expected)

    # 5: every contraction is in the table with a reason.
    for op in rewritten.ops:
        assert op.precision.reason and (op.macs is not None or op.precision.mode == "uncounted")
