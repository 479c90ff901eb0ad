"""Sizes that guards read come from runs without data, where torch can make them."""

from __future__ import annotations

import torch

from tests.build import rewritten
from tests.models import build


def test_sizes_behind_a_product_of_experts_need_no_data() -> None:
    """On a CPU torch computes it in float32; on the meta device it refuses to, before 2.15."""
    case = build("mixtral")
    model = rewritten(case, method="float", check=True)
    recording = model._state.variants.first.recording
    values = recording.call.bind(case.args, case.keywords)
    without_data = tuple(torch.empty_like(value, device="meta") for value in values)
    assert recording.guards[True].all
    for each in (values, without_data):
        recording.guards[True]._known.clear()
        assert recording.failed_guard(each, model._state.original, True) is None
