"""Planted faults: a comparison names op, operand and product, and a watched step shows them."""

from __future__ import annotations

import pytest
import torch

from fractrain_fx import FracConfig
from fractrain_fx.numerics import compare, watch
from tests.models import thinned
from tests.numerics.faults import EIGHT, FAULTS, MODELS, NVFP4, loss_of, rewritten


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fault", thinned(FAULTS, 3))
def test_a_planted_fault_is_named_by_compare_and_shown_by_watch(name: str, fault: str) -> None:
    torch.manual_seed(0)
    subject, planted = MODELS[name], FAULTS[fault]
    plain = subject.build()
    config, op, operand, product = planted.plant(subject, plain)
    model = rewritten(plain, subject.batch, config)
    first = compare(model, subject.batch, shares="estimated").first
    assert first is not None
    assert (first.op, first.operand, first.product, first.kind) == (op, operand, product, planted.kind), str(first)
    with watch(model) as watched:
        loss_of(model, subject.batch).backward()
    assert planted.shows(watched.records[0].of(op, operand, product))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *((name, EIGHT) for name in MODELS),
        ("vit", NVFP4),
        *(pytest.param(name, NVFP4, marks=pytest.mark.long) for name in ("resnet18", "gpt2")),
    ],
    ids=lambda value: getattr(value, "format", value),
)
def test_a_healthy_model_has_nothing_to_name_and_its_numbers_do_not_look_like_a_fault(
    name: str, config: FracConfig
) -> None:
    torch.manual_seed(0)
    subject = MODELS[name]
    model = rewritten(subject.build(), subject.batch, config)
    found = compare(model, subject.batch, shares="estimated")
    assert [str(each) for each in found.findings] == []
    shown = [fault for fault in FAULTS.values() for each in found.operands if fault.shows(each.statistics)]
    assert shown == []
