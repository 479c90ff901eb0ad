"""Training end to end on a network of a second: every method, going on, stopping, and what is written."""

from __future__ import annotations

import functools
import io
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.utils import counters

from fractrain_fx.config import FracConfig, Manual, Tokens
from fractrain_fx.errors import ConfigError, NonFiniteLossError, RunError
from fractrain_fx.hardware.run_cost import StepPrices, run_cost
from fractrain_fx.hardware.run_machines import PRICED, price_run
from fractrain_fx.report.runs import read_runs
from fractrain_fx.training import RunSettings, TrainSettings, build_trainer, new_run, results_table, resume_run
from fractrain_fx.training.log.records import Evaluation
from fractrain_fx.training.log.results import RunResult
from fractrain_fx.training.trainer import Trainer
from tests.training.data.layouts import tensors
from tests.training.folder.rewritten import rewrite
from tests.training.runs import quiet, settings, weights


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], None]:
    """Puts a copy of a finished run of a method into a folder; each method is trained once."""

    @functools.cache
    def trained(method: str) -> Path:
        folder = tmp_path_factory.mktemp(method)
        new_run(settings(method), folder, quiet()).fit()
        return folder

    def copy(method: str, folder: Path) -> None:
        shutil.copytree(trained(method), folder, dirs_exist_ok=True)

    return copy


@pytest.mark.parametrize("method", ["float", "static", "pfq", "dfq", "fractrain", "slu"])
def test_every_method_trains_and_counts_its_cost(method: str) -> None:
    trainer = build_trainer(settings(method, epochs=3), console=quiet())
    result = trainer.fit()
    losses = [row.loss for row in trainer.engine.ledger.rows]
    assert losses[0] is not None and losses[-1] is not None and losses[-1] < losses[0]
    assert 0 <= result.mean_cp <= result.mean_cp_total <= 1 and result.mean_cp_total > 0  # SLU may skip all
    assert result.total_macs == pytest.approx(3 * trainer.model.macs * result.mean_cp_total * 3 * 96)
    if method in ("float", "static"):
        assert result.mean_cp == pytest.approx(1.0 if method == "float" else 0.0625)
    assert len(result.turning_points) == (2 if method in ("pfq", "fractrain") else 0)


@pytest.mark.parametrize("method", ["pfq", "fractrain"])
def test_an_epoch_is_tested_in_the_stage_that_was_trained(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build_trainer(settings(method, epochs=3), console=quiet())
    tested: list[int] = []
    evaluate = trainer.evaluate

    def noted() -> Evaluation:
        tested.append(trainer.engine.stage)
        return evaluate()

    monkeypatch.setattr(trainer, "evaluate", noted)
    trainer.fit()
    assert tested == [row.stage for row in trainer.engine.ledger.rows] and len(set(tested)) == 3


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    whole = new_run(settings(epochs=4), tmp_path / "whole", quiet())
    whole.fit()

    parts = new_run(settings(epochs=4), tmp_path / "parts", quiet())
    interrupt_in_epoch(parts, 3)
    with pytest.raises(KeyboardInterrupt):
        parts.fit()
    resumed = resume_run(tmp_path / "parts", quiet())
    result = resumed.fit()

    assert result.epochs == 4
    ours, theirs = weights(resumed), weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert resumed.engine.state_dict() == whole.engine.state_dict()
    rows = [json.loads(line) for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4]


def test_a_sharded_run_is_that_of_a_whole_model_and_goes_on(tmp_path: Path) -> None:
    whole = new_run(settings(epochs=3), tmp_path / "whole", quiet())
    whole.fit()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parts = new_run(settings(epochs=3, shard=True, accumulate=1), tmp_path / "parts", quiet())
        interrupt_in_epoch(parts, 3)
        with pytest.raises(KeyboardInterrupt):
            parts.fit()
        resumed = resume_run(tmp_path / "parts", quiet())
        resumed.fit()
    finally:
        dist.destroy_process_group()
    for ours, theirs in zip(resumed.engine.ledger.rows, whole.engine.ledger.rows, strict=True):
        assert (ours.stage, ours.cp, ours.options) == (theirs.stage, theirs.cp, theirs.options)
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)  # the optimizer computes on DTensors
    files = [load_file(tmp_path / run / "checkpoint-0003" / "model.safetensors") for run in ("parts", "whole")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.allclose(files[0][name], value, atol=1e-4) for name, value in files[1].items())


def interrupt_in_epoch(trainer: Trainer, epoch: int) -> None:
    loss = trainer.engine.loss

    def interrupting(task_loss: torch.Tensor) -> torch.Tensor:
        if len(trainer.engine.ledger.rows) == epoch - 1:
            raise KeyboardInterrupt
        return loss(task_loss)

    trainer.engine.loss = interrupting  # type: ignore[method-assign, assignment]


def test_a_run_interrupted_before_its_first_epoch_can_go_on(tmp_path: Path) -> None:
    trainer = new_run(settings(), tmp_path, quiet())
    interrupt_in_epoch(trainer, 1)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert resume_run(tmp_path, quiet()).fit().epochs == 2


def test_a_run_folder_holds_settings_metrics_and_the_result(tmp_path: Path) -> None:
    result = new_run(settings(), tmp_path, quiet()).fit()
    names = {path.name for path in tmp_path.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "result.json", "samples.json", "checkpoint-0002", "tensorboard"} == names
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert {"epoch", "stage", "loss", "cp", "cp_total", "test_accuracy", "total_macs", "options"} <= first.keys()
    assert json.loads((tmp_path / "result.json").read_text())["total_macs"] == result.total_macs


def test_a_folder_with_a_run_is_not_overwritten(finished: Callable[[str, Path], None], tmp_path: Path) -> None:
    finished("fractrain", tmp_path)
    with pytest.raises(RunError, match="--resume"):
        new_run(settings(), tmp_path, quiet())


def test_resuming_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run"):
        resume_run(tmp_path, quiet())


def test_a_diverging_run_stops_and_names_the_checkpoint_before(tmp_path: Path) -> None:
    trainer = new_run(settings("static", "diverging"), tmp_path, quiet())
    with pytest.raises(NonFiniteLossError, match=r"epoch 1.*last good checkpoint is .*checkpoint-0000$"):
        trainer.fit()
    assert (tmp_path / "checkpoint-0000" / "model.safetensors").exists()
    with pytest.raises(NonFiniteLossError, match="keeps no checkpoints"):
        build_trainer(settings("static", "diverging"), console=quiet()).fit()


def test_weights_spoilt_by_the_last_step_of_an_epoch_are_not_kept(tmp_path: Path) -> None:
    # Three batches an epoch; fractrainify, which calls the model too, is through before the hook counts.
    trainer = new_run(settings("float", "spoilt", epochs=4), tmp_path, quiet())
    plain: Any = trainer.model.restore()
    plain.calls = 0
    with pytest.raises(NonFiniteLossError, match=r"after epoch 2 the weight head\.weight .*checkpoint-0001$"):
        trainer.fit()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-0001"]


def test_resuming_under_another_configuration_is_refused(finished: Callable[[str, Path], None], tmp_path: Path) -> None:
    finished("fractrain", tmp_path)
    config = tmp_path / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("weight_bits: 6", "weight_bits: 4").replace("seed: 0\n", "seed: 1\n"))
    with pytest.raises(RunError, match=r"seed was 0 and is 1.*weight_bits was 6 and is 4"):
        resume_run(tmp_path, quiet())
    config.write_text(text.replace("workers: 4", "workers: 0"))  # decides nothing
    assert resume_run(tmp_path, quiet()).result().epochs == 2


def test_a_trainer_does_not_write_over_another_ones_run(finished: Callable[[str, Path], None], tmp_path: Path) -> None:
    finished("fractrain", tmp_path)
    metrics = (tmp_path / "metrics.jsonl").read_text()
    first = build_trainer(settings(epochs=1), console=quiet())
    second = Trainer(first.model, first.data, first.settings, out=tmp_path, console=quiet())
    with pytest.raises(RunError, match=r"holds a run: call resume\(\) first"):
        second.fit()
    shutil.rmtree(tmp_path / "checkpoint-0002")  # which takes most room
    with pytest.raises(RunError, match="holds a run: its checkpoint is gone, so move its files away"):
        second.fit()
    assert (tmp_path / "metrics.jsonl").read_text() == metrics


def test_a_run_stopped_before_its_first_checkpoint_starts_over(tmp_path: Path) -> None:
    new_run(settings(), tmp_path, quiet())
    assert not list(tmp_path.glob("checkpoint-*"))
    assert resume_run(tmp_path, quiet()).fit().epochs == 2


def test_a_killed_process_leaves_no_half_line_in_the_metrics(tmp_path: Path) -> None:
    trainer = new_run(settings(epochs=3), tmp_path, quiet())
    interrupt_in_epoch(trainer, 3)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 3, "los')
    resume_run(tmp_path, quiet()).fit()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2, 3]


def test_an_epoch_can_be_shorter_or_longer_than_a_pass(tmp_path: Path) -> None:
    # 3 batches of 32 a pass; an optimizer step takes 2.
    long = build_trainer(settings("pfq", epochs=3, epoch_steps=4, accumulate=2), console=quiet())
    assert [row.samples for row in (long.fit(), long.engine.ledger.rows)[1]] == [256] * 3
    short = new_run(settings("pfq", epochs=4, epoch_steps=1), tmp_path / "short", quiet())
    short.fit()
    assert [row.samples for row in short.engine.ledger.rows] == [32] * 4
    parts = new_run(settings("pfq", epochs=4, epoch_steps=1), tmp_path / "parts", quiet())
    interrupt_in_epoch(parts, 3)
    with pytest.raises(KeyboardInterrupt):
        parts.fit()
    resumed = resume_run(tmp_path / "parts", quiet())
    resumed.fit()
    assert resumed.engine.state_dict() == short.engine.state_dict()


def test_a_stage_may_begin_within_an_epoch_and_a_stopped_run_goes_on_at_the_same_step(tmp_path: Path) -> None:
    clock = {"schedule": {"kind": "fixed", "every": "2 steps", "turns": ["4 steps"]}}  # 3 steps an epoch
    whole = settings("pfq", epochs=3).to_dict() | {"stages": "FW(4,8)/BW(6,8)"} | clock
    run = new_run(RunSettings.from_dict(whole), tmp_path / "whole", quiet())
    result = run.fit()
    assert (result.turning_points, result.turning_steps) == ((2,), (4,))
    lines = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert [[part["level"] for part in line["parts"]] for line in lines] == [[], ["FW-4/BW-6", "FW-8/BW-8"], []]
    assert [line["step"] for line in lines] == [3, 6, 9]
    assert RunResult.from_json(tmp_path / "whole/result.json") == result
    (shown,) = read_runs([str(tmp_path / "whole")])
    assert shown.turning_points == (2,) and shown.turning_texts == ("2 (step 4)",)
    entries = run_cost(StepPrices(run.model, 32), run.engine.ledger.rows).entries
    assert list(dict.fromkeys(entry.stage for entry in entries)) == ["1: FW-4/BW-6", "2: FW-8/BW-8"]
    parts = new_run(RunSettings.from_dict(whole), tmp_path / "parts", quiet())
    interrupt_in_epoch(parts, 2)
    with pytest.raises(KeyboardInterrupt):
        parts.fit()
    resumed = resume_run(tmp_path / "parts", quiet())
    resumed.fit()
    assert resumed.engine.state_dict() == run.engine.state_dict()


def test_a_run_keeps_what_it_would_take_on_machines(tmp_path: Path) -> None:
    run = new_run(settings("pfq", epochs=3), tmp_path / "run", quiet())
    result = run.fit()
    assert result.machines == price_run(run.model, run.engine.ledger.rows, 32)
    kept = RunResult.from_json(tmp_path / "run/result.json").machines
    assert kept == result.machines and [each.machine for each in kept] == list(PRICED)
    bitfusion = next(each for each in kept if each.machine == "bitfusion")
    assert (bitfusion.seconds, bitfusion.joules) == pytest.approx((result.latency, result.energy))


def test_a_clock_in_tokens_needs_text() -> None:
    with pytest.raises(ConfigError, match="has none: count steps"):
        build_trainer(
            RunSettings.from_dict(settings("pfq").to_dict() | {"schedule": {"every": "100 tokens"}}), console=quiet()
        )


def test_the_seed_decides_the_run() -> None:
    results = []
    for seed in (0, 0, 1):
        trainer = build_trainer(settings(seed=seed), console=quiet())
        trainer.fit()
        results.append(weights(trainer))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    assert any(not torch.equal(results[0][name], results[2][name]) for name in results[0])


def test_a_run_compiles_in_the_mode_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []

    def compile(model: nn.Module, mode: str) -> nn.Module:
        modes.append(mode)
        return model

    monkeypatch.setattr(torch, "compile", compile)
    for mode in ("default", "reduce-overhead"):
        build_trainer(settings("pfq", epochs=1, compile=True, compile_mode=mode), console=quiet())
    assert modes == ["default", "reduce-overhead"]


@pytest.mark.long
def test_a_run_compiles_segments() -> None:
    trainer = build_trainer(settings("pfq", epochs=1, compile_segments=True), console=quiet())
    counters.clear()
    before = weights(trainer)
    trainer.fit()
    assert counters["stats"]["unique_graphs"] > 1
    assert any(not torch.equal(before[name], now) for name, now in weights(trainer).items())


@pytest.mark.long
def test_checkpointing_gives_the_same_run() -> None:
    found = []
    for checkpointing in (False, True):
        trainer = build_trainer(settings(epochs=1, checkpointing=checkpointing), console=quiet())
        trainer.fit()
        assert trainer.model.is_gradient_checkpointing == checkpointing
        found.append(weights(trainer))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_accumulated_batches_make_one_optimizer_step() -> None:
    trainer = build_trainer(settings("float", accumulate=3, epochs=1), console=quiet())
    steps: list[object] = []
    trainer._prepared.optimizer.optimizer.register_step_post_hook(lambda *arguments: steps.append(arguments))
    trainer.fit()
    assert len(steps) == 1


@pytest.mark.parametrize("method", ["float", "dfq"])
def test_a_step_with_fewer_batches_than_accumulate_takes_their_mean_too(method: str) -> None:
    runs = []
    for accumulate in (3, 8):  # 3 batches a pass
        trainer = build_trainer(settings(method, accumulate=accumulate, epochs=2), console=quiet())
        trainer.fit()
        runs.append((weights(trainer), trainer.engine.state_dict()))
    assert all(torch.equal(runs[0][0][name], runs[1][0][name]) for name in runs[0][0])
    assert runs[0][1] == runs[1][1]


@pytest.mark.long
def test_a_run_whose_last_steps_are_short_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    whole = new_run(settings(epochs=3, accumulate=2), tmp_path / "whole", quiet())
    whole.fit()
    parts = new_run(settings(epochs=3, accumulate=2), tmp_path / "parts", quiet())
    interrupt_in_epoch(parts, 2)
    with pytest.raises(KeyboardInterrupt):
        parts.fit()
    resumed = resume_run(tmp_path / "parts", quiet())
    resumed.fit()
    assert all(torch.equal(weights(resumed)[name], value) for name, value in weights(whole).items())
    assert resumed.engine.state_dict() == whole.engine.state_dict()


def test_evaluation_sees_every_test_sample() -> None:
    trainer = build_trainer(settings("float", epochs=1), console=quiet())
    trainer.fit()
    model, data = trainer.model.eval(), trainer.data
    samples, targets = tensors(data.test)
    inputs = data.prepare(samples)
    with torch.no_grad():
        right = (model(inputs).argmax(1) == targets).float().mean()
    loss, accuracy, choices, _ = trainer.evaluate()
    assert choices is None  # there are no gates
    assert accuracy == pytest.approx(100 * float(right)) and math.isfinite(loss)


def test_metrics_say_how_far_the_gates_chose_by_input(tmp_path: Path) -> None:
    trainer = new_run(settings("dfq", epochs=1), tmp_path, quiet())
    trainer.fit()
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    choices = trainer.evaluate().dependence
    assert choices is not None and len(choices.mutual_information) == len(trainer.model.cost.choice)
    assert row["mutual_information"] == choices.mean_information
    assert (row["configurations"], row["commonest"]) == (choices.configurations, choices.commonest)
    assert 1 <= row["configurations"] <= len(trainer.data.test) and 0 < row["commonest"] <= 1


@pytest.mark.long
def test_a_multiplier_goes_on_where_the_run_was_stopped(tmp_path: Path) -> None:
    run = settings(epochs=3)
    run = replace(run, frac=run.frac.replace(**{"affine.gradient_grid": "zero", "gate.control": "multiplier"}))
    whole = new_run(run, tmp_path / "whole", quiet())
    whole.fit()
    parts = new_run(run, tmp_path / "parts", quiet())
    interrupt_in_epoch(parts, 2)
    with pytest.raises(KeyboardInterrupt):
        parts.fit()
    resumed = resume_run(tmp_path / "parts", quiet())
    resumed.fit()
    ours, theirs = weights(resumed), weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    state = whole.engine.state_dict()["cost_term"]
    assert resumed.engine.state_dict()["cost_term"] == state and state["integral"] != 0


def test_text_is_trained_by_perplexity() -> None:
    clock = FracConfig(method="pfq", stages="FW(4,6,8)/BW(6,6,8)", schedule=Manual(every=Tokens(512)))
    loop = TrainSettings(epochs=2, batch_size=16, device="cpu")
    trainer = build_trainer(
        RunSettings("hf:gpt2", "pydoc", block_length=16, subset=64, train=loop, frac=clock), console=quiet()
    )
    result = trainer.fit()
    assert result.metric == "perplexity" and 1 < result.value < 200
    assert trainer.engine.ledger.rows[-1].tokens == 2048 and result.turning_steps == (4, 6)  # 4 windows of 2 steps


def test_a_device_that_is_not_there_is_refused() -> None:
    if torch.backends.mps.is_available():
        pytest.skip("this machine has it")
    with pytest.raises(ConfigError, match="mps"):
        build_trainer(settings(device="mps"), console=quiet())


def test_the_table_compares_runs() -> None:
    results = [build_trainer(settings(method, epochs=1), console=quiet()).fit() for method in ("float", "static")]
    blocks = replace(settings(epochs=1), frac=FracConfig(method="static", format="mx", precision="FW-8/BW-8"))
    results.append(build_trainer(blocks, console=quiet()).fit())
    console = Console(width=100, record=True, quiet=True)
    with console.capture() as capture:
        console.quiet = False
        console.print(results_table(results))
    text = capture.get()
    assert "100.00" in text and "6.25" in text and f"{results[1].total_macs:.3e}" in text
    assert results[1].energy and results[2].energy is None  # BitFusion has no price for mx
    assert [line.split()[6:8] for line in text.splitlines() if "static" in line][1] == ["-", "-"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda lines: [], "it is empty"),
        (lambda lines: lines[:1], "it ends with epoch 1"),
        (lambda lines: [lines[0], lines[1][:40]], "metrics.jsonl is damaged"),
        (lambda lines: [re.sub(r'"cp": [^,]+', '"cp": null', line) for line in lines], "cp=None must be a number"),
        (lambda lines: [re.sub(r'"lr": [^,]+', '"lr": "x"', line) for line in lines], "lr='x' must be a number"),
        (lambda lines: ["{}", lines[1]], "metrics.jsonl is damaged"),
        (lambda lines: [lines[0], lines[0]], "epoch 1 follows epoch 1"),
    ],
)
def test_damaged_metrics_are_not_resumed_with_nothing_said(
    content: Callable[[list[str]], list[str]], message: str, finished: Callable[[str, Path], None], tmp_path: Path
) -> None:
    finished("static", tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    changed = "\n".join(content(metrics.read_text().splitlines()))
    metrics.write_text(changed)
    with pytest.raises(RunError, match=message):
        resume_run(tmp_path, quiet())
    assert metrics.read_text() == changed


def test_a_run_goes_on_without_its_metrics_and_says_so(finished: Callable[[str, Path], None], tmp_path: Path) -> None:
    finished("static", tmp_path)
    (tmp_path / "metrics.jsonl").rename(tmp_path / "lost.jsonl")  # as the message about damaged metrics says
    console = Console(file=io.StringIO(), width=400)
    resume_run(tmp_path, console).fit()
    assert "metrics.jsonl has no lines of the first 2 epochs, which were lost" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("training.pt", lambda content: content["optimizer"]["param_groups"].pop()),
        ("training.pt", lambda content: content["random"].clear()),
        ("training.pt", lambda content: content["optimizer"]["param_groups"][0].pop("params")),
        ("state.json", lambda content: content["state"]["engine"]["ledger"]["epochs"][0].pop("loss")),
        ("state.json", lambda content: content["state"]["best"].update(more=1)),
    ],
)
def test_content_that_does_not_fit_the_run_is_refused_with_its_file(
    name: str, spoil: Callable[[Any], object], finished: Callable[[str, Path], None], tmp_path: Path
) -> None:
    finished("pfq", tmp_path)
    folder = tmp_path / "checkpoint-0002"

    def change(content: Any) -> Any:
        spoil(content)
        return content

    rewrite(folder / name, change)
    with pytest.raises(RunError, match=f"checkpoint-0002/{name} is damaged"):
        resume_run(tmp_path, quiet())
