"""What must always hold (docs/background/architecture.md, "Invariants"), on real models of every kind."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import Engine, FracConfig, FracModel
from fractrain_fx.capture import resize_batch
from fractrain_fx.capture.compare import difference
from fractrain_fx.capture.state import seeded
from fractrain_fx.capture.trees import tensors_in
from tests.build import objective, paper
from tests.build import rewritten as rewritten_case
from tests.models import HOME_MADE, HUGGING_FACE, TIMM, Case, build, some_long

NAMES = [*TIMM, *HUGGING_FACE, *HOME_MADE]
DEEP = ("swin_tiny_patch4_window7_224", "densenet121", "levit_128s", "resnet50", "vit_tiny_patch16_224")
WIDE = ("efficientnet_b0", "convnext_atto", "mobilenetv2_100", "torchvision_resnet18")
LARGE = ("bart", "resnet18", "llama", "vit", "t5", "test_nfnet")
CASES = some_long(NAMES, *LARGE, slow=(*DEEP, *WIDE))
TRAINED = some_long(NAMES, *LARGE, "bert", "mixtral", slow=(*DEEP, *WIDE))


class Step(NamedTuple):
    """The outputs, gradients and buffers of one training step."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def floats(output: Any) -> list[Tensor]:
    return [x for x in tensors_in(output) if x.is_floating_point()]


def call(model: nn.Module, case: Case, seed: int) -> Any:
    args, keywords = case.on(lambda x: x.detach().clone())  # a model may write to its inputs
    with seeded(seed):
        return model(*args, **keywords)


def training(model: nn.Module, case: Case, seed: int) -> Step:
    model.train().zero_grad()
    output = call(model, case, seed)
    objective(output).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    buffers = {name: b.clone() for name, b in model.named_buffers() if not name.startswith("frac.")}
    return Step([x.detach() for x in floats(output)], gradients, buffers)


@torch.no_grad()
def evaluation(model: nn.Module, case: Case) -> list[Tensor]:
    return floats(call(model.eval(), case, 0))


def assert_same(left: object, right: object) -> None:
    assert difference(left, right) is None


@pytest.mark.parametrize("name", CASES)
def test_method_float_equals_the_original_bit_for_bit(name: str) -> None:
    case = build(name)
    original = copy.deepcopy(case.model)
    rewritten = rewritten_case(case, config=FracConfig(method="float"), check=True)
    mine, theirs = training(rewritten, case, 7), training(original, case, 7)
    assert_same(mine.outputs, theirs.outputs)
    assert_same(mine.gradients, theirs.gradients)
    assert_same(mine.buffers, theirs.buffers)
    larger = Case(original, **resize_batch({"args": case.args, "kwargs": case.keywords}, 3))
    assert_same(evaluation(rewritten, larger), evaluation(original, larger))


@pytest.mark.parametrize("name", TRAINED)
def test_names_ties_class_and_weights_survive_and_the_result_trains_copies_and_reloads(
    name: str, tmp_path: Any
) -> None:
    case = build(name)
    plain, checkpoint = copy.deepcopy(case.model), case.model.state_dict()
    had_gradient = training(plain, case, 1).gradients.keys()
    rewritten = rewritten_case(case, config=paper(), check=True)

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
