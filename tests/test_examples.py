"""The example scripts run, and FracTrain takes in a plain script the lines that docs/how-to/own-model.md shows."""

from __future__ import annotations

import difflib
import runpy
import shlex
from pathlib import Path

import pytest
import torch

from fractrain_fx import cli
from tests.build import rewritten

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def changes() -> list[str]:
    """Lines that differ between the two scripts, below their docstrings; blank ones apart."""
    plain, fractrain = ((EXAMPLES / name).read_text().splitlines()[1:] for name in ("plain.py", "plain_fractrain.py"))
    marked = difflib.ndiff(plain, fractrain)
    return [line for line in marked if line[0] in "+-" and line[1:].strip()]


def test_a_plain_script_needs_one_line_changed_and_four_new_ones_and_the_page_shows_them() -> None:
    removed = [line[2:] for line in changes() if line[0] == "-"]
    added = [line[2:] for line in changes() if line[0] == "+"]
    assert (len(removed), len(added)) == (1, 5)
    page = (ROOT / "docs" / "how-to" / "own-model.md").read_text()
    for mark, lines in (("-", removed), ("+", added)):
        for line in lines:
            assert f"\n{mark}{line}\n" in page


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain", "plain_fractrain"])
def test_both_scripts_learn(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("epoch 2: test accuracy") and float(last.split()[-1].rstrip("%")) > 20  # chance is 10


@pytest.mark.long
def test_a_packed_llama_learns_in_trainer_and_merges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    losses = runpy.run_path(str(EXAMPLES / "finetune_llama.py"))["main"](steps=16)
    assert losses[-1] < losses[0] - 0.3
    told = capsys.readouterr().out
    share = float(told.partition(" of float32")[0].split()[-1])
    assert share <= 0.16 and "merged into a LlamaForCausalLM of 1,647,872 parameters" in told


@pytest.mark.long
def test_trainer_resumes_a_packed_model_bit_for_bit(tmp_path: Path) -> None:
    script = runpy.run_path(str(EXAMPLES / "finetune_llama.py"))
    rows = script["texts"]()[:100]
    usual = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": []}

    def trained(folder: str, resumed: Path | None = None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        inputs = script["batch"](rows, 0, 2)
        model = rewritten(script["adapted"](script["SMALL"]), keywords=inputs, config=script["settings"](4))
        model.pack_frozen()
        arguments = script["TrainingArguments"](str(tmp_path / folder), **usual)
        script["FracTrainer"](model, arguments, train_dataset=rows).train(resume_from_checkpoint=resumed)
        return model.state_dict()

    whole = trained("whole")
    again = trained("again", tmp_path / "whole" / "checkpoint-2")
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.long
def test_the_memory_of_a_large_llama_is_computed_without_its_weights(capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(EXAMPLES / "finetune_llama.py"))
    config = script["LlamaConfig"](vocab_size=32000, num_hidden_layers=2)  # two layers of LLaMA-7B's size
    found = script["estimate"](config, length=256)
    projections, wide = 2 * 4 * 4096 * 4096, 2 * 3 * 4096 * 11008
    codes = (projections + wide) // 2 + 32000 * 4096
    assert found["base: codes, embeddings and norms"] == codes + 4 * (32000 * 4096 + 5 * 4096)
    assert found["base: ranges of codes"] == 8 * (2 * (5 * 4096 + 2 * 11008) + 32000) + 15 * 4
    kept, fewer = found["activations"], found["activations with checkpointing"]
    assert fewer < 0.5 * kept and fewer > 4 * 256 * (32000 + 4 * 4096)  # logits, and what goes from segment to segment


@pytest.mark.long
def test_the_demo_leaves_runs_that_its_last_line_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    demo = runpy.run_path(str(EXAMPLES / "demo.py"))
    demo["main"](epochs=1)
    demo["main"](epochs=1)  # replaces what the first one left
    program, *arguments = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert Path(program).name == "fractrain"
    assert cli.main(arguments) == 0
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()
