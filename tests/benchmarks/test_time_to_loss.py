"""The benchmark of whole trainings: same batches for all, when a loss is reached, tables with and without training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.records import Quartiles, read_json
from benchmarks.time_to_loss import training
from benchmarks.time_to_loss.__main__ import main
from benchmarks.time_to_loss.curves import Curve, Reached, Run, Target, run_of, targets
from benchmarks.time_to_loss.table import markdown, notes
from benchmarks.time_to_loss.training import METHODS, Text, Trainee
from fractrain_fx import FracConfig
from fractrain_fx.training.data.text import blocks
from fractrain_fx.training.settings import TrainSettings
from fractrain_fx.zoo.models.transformer import TransformerLM

TINY = ["--width", "16", "--layers", "1", "--length", "8", "--batch", "4", "--steps", "6", "--epoch", "2"]
TINY += ["--every", "2", "--blocks", "8", "--probe", "1"]


def falling(method: str, second: float, *losses: float, **more: object) -> Curve:
    """A curve with a validation after every second step."""
    steps = [2 * (index + 1) for index in range(len(losses))]
    return Curve(method, 0.5, [second] * steps[-1], list(zip(steps, losses, strict=True))).replace(**more)


def a_run() -> Run:
    rows = [
        {"epoch": epoch, "stage": stage, "samples": 4, "options": {"a": [skipped, 1 - skipped], "b": [0.0, 1.0]}}
        for epoch, stage, skipped in ((1, 0, 1.0), (2, 1, 0.5))
    ]
    ledger = {"mean_cp_total": 0.0213, "epochs": rows}
    curves = [
        falling("float", 1.0, 4.0, 3.0, 2.0, 1.0),
        Curve("float+bf16", 0.1, [8.0, 9.0], beside=[1.0, 1.0], note="too slow"),
        falling("fractrain-auto", 0.5, 5.0, 4.0, 3.0, 2.0, ledger=ledger),
    ]
    settings = dict(steps=8, batch=4, lr=1e-3, epoch=2, blocks=8, every=2, options=5, beta=1e-3)
    return Run("a small model", settings, "python -m x", {"threads": "1"}, curves)


def test_a_loss_is_reached_when_the_mean_of_three_validations_is_there() -> None:
    curve = falling("float", 0.5, 4.0, 1.0, 4.0, 1.0, 1.0)
    assert curve.smooth == [(6, 3.0), (8, 2.0), (10, 2.0)]
    assert curve.reached(2.5) == Reached(8, 4.0) and curve.reached(curve.final) == Reached(8, 4.0)
    assert curve.reached(1.0) is None, "one low validation alone is chance"


def test_targets_are_all_final_losses_and_round_numbers_that_all_reach() -> None:
    curves = [curve for curve in a_run().curves if curve.trained]
    rows = targets(curves)
    assert rows[-1] == Target(2.0, "float") and Target(3.0, "fractrain-auto") in rows
    shared = [target.loss for target in rows if not target.final_of]
    assert shared and all(curve.reached(loss) for loss in shared for curve in curves)
    assert targets([]) == []


def test_the_tables_have_every_number_and_the_reason_for_every_missing_one() -> None:
    text = markdown(a_run())
    methods = "| fractrain-auto | 500.0 (500.0-500.0) | 0.50 (0.50-0.50) | 4.0 | 3.000 | 38 % | 2.13 % | 2 |"
    assert methods in text
    assert "| float+bf16 | 8500.0 (8250.0-8750.0) | 8.50 (8.25-8.75) | not trained | not trained |  |  |  |" in text
    assert "| 3.000 (end of fractrain-auto) | 6 steps, 6.0 s (1.00) | 8 steps, 4.0 s (0.67) |" in text
    assert "| 2.000 (end of float) | 8 steps, 8.0 s (1.00) | not reached |" in text
    assert any("float+bf16: 2 steps were timed" in line and "too slow" in line for line in notes(a_run()))


def test_all_methods_see_the_same_batches_and_each_training_block_once_a_pass() -> None:
    train, test = blocks(torch.arange(41), 4), blocks(torch.arange(21), 4)
    text = Text.drawn(train, test, steps=6, batch=3, blocks=2, seed=0)
    assert text.tokens.shape == (6, 3, 4) and torch.equal(text.tokens + 1, text.targets)
    first_pass = text.tokens.flatten(0, 1)[:10, 0]
    assert sorted(first_pass.tolist()) == train.tensors[0][:, 0].tolist()
    assert [x[:, 0].tolist() for x, _ in text.held_out] == [[0, 16]]


@pytest.mark.parametrize("method", ["static", "fractrain-auto"])
def test_a_method_trains_its_own_copy_and_ends_epochs(method: str) -> None:
    torch.manual_seed(0)
    start = TransformerLM(12, width=16, hidden=32, layers=1, heads=1, dropout=0.0)
    before = {name: value.clone() for name, value in start.state_dict().items()}
    split = blocks(torch.randint(12, (161,)), 8)
    text = Text.drawn(split, split, steps=5, batch=4, blocks=4, seed=0)
    trainee = Trainee(method, start, text, TrainSettings(iterations=5, epoch_steps=2), FracConfig.paper())
    (curve,) = training.train([trainee], steps=5, every=3, tell=lambda line: None)
    assert len(curve.seconds) == 5 and [step for step, _ in curve.validation] == [3, 5]
    assert curve.ledger is not None and [row["samples"] for row in curve.ledger["epochs"]] == [8, 8, 4]
    assert (curve.skipped is None) == (method == "static")
    assert all(torch.equal(before[name], value) for name, value in start.state_dict().items())


@pytest.mark.long
def test_the_command_trains_writes_and_shows_again_without_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, page, again = tmp_path / "run.json.gz", tmp_path / "page.md", tmp_path / "again.md"
    monkeypatch.setattr("benchmarks.time_to_loss.__main__.computes_bf16", lambda: False)
    main([*TINY, "--json", str(kept), "--table", str(page)])
    (values,) = read_json(kept).values()
    run = run_of(values)
    assert [curve.method for curve in run.curves] == list(METHODS)
    assert [curve.trained for curve in run.curves] == [method != "float+bf16" for method in METHODS]
    assert run.curves[0].ratio(run.float_curve) == Quartiles(1.0, 1.0, 1.0)
    assert "has no bfloat16 products" in page.read_text() and str(tmp_path) not in page.read_text()
    main(["--from", str(kept), "--table", str(again)])
    assert again.read_text() == page.read_text()
    with pytest.raises(SystemExit, match="holds no run"):
        main(["--from", str(tmp_path / "none.json")])
