"""The benchmark of skipped blocks: shares of a batch that skip, forms that are measured, tables."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from benchmarks import skipping
from benchmarks.records import Quartiles, command
from benchmarks.skipping import FORMS, Row, Run, markdown, prepare, skip_share
from benchmarks.step.subjects import SUBJECTS, Subject
from fractrain_fx import FracConfig
from tests.build import paper, rewritten
from tests.residual import Residual


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_the_share_of_a_batch_skips_and_the_rest_takes_all_other_options(share: float) -> None:
    x = torch.randn(32, 6)
    model = rewritten(Residual(), x[:2], config=paper("dfq"))
    skip_share(model, 32, share)
    model(x)
    (choice,) = model.cost.choice.values()
    counts = choice.sum(0).tolist()
    assert counts[0] == 32 * share and max(counts[1:]) - min(counts[1:]) <= 1


def test_all_forms_step_and_leave_the_model_as_it_was() -> None:
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    model = Residual()
    before = copy.deepcopy(model.state_dict())
    for form in FORMS:
        step = prepare(form, FracConfig(method="slu"), model, x, y, F.cross_entropy, 0.5)
        step.run()
        assert all(p.grad is None for p in step.parameters)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_run_is_kept_and_written_between_its_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject(
        "small", Residual, {"cpu": 8}, lambda n: (torch.randn(n, 6), torch.randint(3, (n,))), F.cross_entropy
    )
    monkeypatch.setitem(SUBJECTS, "resnet38", subject)
    page, kept = tmp_path / "page.md", tmp_path / "runs.json"
    for share in ("0.5", "0"):
        options = [
            "--models",
            "resnet38",
            "--rounds",
            "1",
            "--shares",
            share,
            "--json",
            str(kept),
            "--table",
            str(page),
        ]
        skipping.main(options)
    text = page.read_text()
    assert text.startswith("<!-- benchmarks.skipping -->") and "small, batch 8, method dfq" in text
    assert text.index("| 0% | masked |") < text.index("| 50% | dispatched |")


def test_tables_say_how_they_were_made() -> None:
    row = Row(0.5, "dispatched", Quartiles(2, 1, 3), Quartiles(0.6, 0.5, 0.7), Quartiles(1.2, 1.1, 1.3), 0.9)
    argv = ["--rounds", "3", "--json", "x.json", "--table=page.md", "--shares", "0.5"]
    how = command("benchmarks.skipping", argv)
    assert how == "python -m benchmarks.skipping --rounds 3 --shares 0.5"
    text = markdown([Run("m", "title", "dfq", 8, 3, how, {"torch": "2"}, [row])])
    assert "| 50% | dispatched | 2.0 (1.0-3.0) | 0.60 (0.50-0.70) | 1.20 (1.10-1.30) | 0.90 |" in text
