"""The test samples that gates spend most and fewest bits on."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from fractrain_fx import FracConfig, fractrainify
from fractrain_fx.nn.cost import CostMeter
from fractrain_fx.training.log.extremes import Extremes, read_samples, write_samples
from tests.residual import Residual

FULL, OPTIONS = (100.0, 100.0, 100.0), 3


def meter() -> CostMeter:
    tables = {"one": [[0, 0, 0], [1, 1, 1], [4, 4, 4]], "two": [[0, 0, 0], [2, 2, 2], [8, 8, 8]]}
    return CostMeter(tables, FULL, (0.0,) * 3, FULL)


def chosen(*options: int) -> torch.Tensor:
    return F.one_hot(torch.tensor(options), OPTIONS).float()


def test_what_samples_cost_has_the_mean_that_the_step_costs() -> None:
    choices = [chosen(0, 1, 2, 2), chosen(2, 0, 1, 2)]
    spent = meter().of_samples(choices)
    torch.testing.assert_close(spent, torch.tensor([24.0, 3.0, 18.0, 36.0]) / 300)
    torch.testing.assert_close(spent.mean(), meter()(choices).cp)


def test_both_ends_of_all_batches_are_kept_with_their_pictures(tmp_path: Path) -> None:
    model = Residual()
    model.meter = meter()
    extremes = Extremes(model)  # type: ignore[arg-type]
    torch.manual_seed(0)
    options = torch.randint(0, OPTIONS, (2, 60))
    images = torch.rand(60, 3, 100, 80)
    for part in range(0, 60, 20):
        rows = slice(part, part + 20)
        extremes.add(
            images[rows], dict(zip(("one", "two"), (F.one_hot(o[rows], OPTIONS) for o in options), strict=True))
        )
    found = extremes.read()
    spent = sorted(meter().of_samples([F.one_hot(o, OPTIONS) for o in options]).tolist())
    assert [each.order for each in found] == [*range(12), *range(48, 60)]
    assert [each.cp for each in found] == pytest.approx([spent[each.order] for each in found])
    head, _, data = str(found[0].picture).partition(",")
    assert head == "data:image/png;base64" and Image.open(io.BytesIO(base64.b64decode(data))).size == (51, 64)
    write_samples(found, tmp_path)
    assert list(read_samples(tmp_path)) == found


def test_few_samples_stand_at_one_end_only_and_what_is_no_image_has_no_picture() -> None:
    model = Residual()
    model.meter = meter()
    extremes = Extremes(model)  # type: ignore[arg-type]
    extremes.add(torch.zeros(5, 7, dtype=torch.long), {"one": chosen(0, 1, 2, 0, 1), "two": chosen(0, 0, 0, 0, 0)})
    found = extremes.read()
    assert [each.order for each in found] == [0, 1, 2, 3, 4] and {each.picture for each in found} == {None}


def test_without_gates_there_is_nothing() -> None:
    model = fractrainify(Residual(), config=FracConfig(method="pfq"), example_inputs=(torch.randn(2, 6),), check=False)
    extremes = Extremes(model)
    extremes.add(torch.zeros(2, 6), {})
    assert extremes.read() == []
