"""``fractrain export``: from a folder alone, in a process that did not train."""

from __future__ import annotations

import json
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fractrain_fx import FracModel
from fractrain_fx.cli import main
from fractrain_fx.cli.export import deployment
from fractrain_fx.config import AffineConfig
from fractrain_fx.errors import ExportError, FracTrainError, RunError
from fractrain_fx.model.saved.folder import architecture_in
from tests.build import rewritten as build_rewritten
from tests.deployable import Convolutions, bert, difference, llama, rewritten, vit

pytest.importorskip("compressed_tensors", reason="needs the extra: pip install 'fractrain_fx[export]'")
ort = pytest.importorskip("onnxruntime", reason="needs the extra: pip install 'fractrain_fx[export]'")

TINY = Path(__file__).parents[1] / "training" / "tiny.py"
QUICK = ["--model", f"{TINY}:net", "--image-size", "8", "--subset", "64", "--batch-size", "32", "--device", "cpu"]


@pytest.mark.long
def test_a_run_is_exported_and_training_ends_by_naming_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *QUICK, "--method", "static", "--precision", "8/8", "--epochs", "1", "--out", str(run)]) == 0
    assert f"fractrain export {run} --to onnx" in capsys.readouterr().out
    assert main(["export", str(run), "--to", "onnx", "--fold-batch-norm"]) == 0
    assert "model.onnx" in str(list((run / "export-onnx").iterdir())) and "bytes" in capsys.readouterr().out
    assert main(["export", str(run), "--to", "compressed-tensors"]) == 2
    assert "models of transformers" in capsys.readouterr().err
    assert main(["export", str(run), "--to", "onnx", "--out", str(run / "config.yaml")]) == 2
    assert "config.yaml is a file: write to another one" in capsys.readouterr().err
    state = next(run.glob("checkpoint-*/state.json"))
    text = state.read_text()
    state.write_text(text.replace('"version": 1', '"version": 2', 1))
    assert main(["export", str(run), "--to", "onnx"]) == 2 and "is damaged" in capsys.readouterr().err
    sums = state.with_name("sha256.json")
    sums.write_text(json.dumps(json.loads(sums.read_text()) | {state.name: sha256(state.read_bytes()).hexdigest()}))
    assert main(["export", str(run), "--to", "onnx"]) == 2 and "newer version" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("build", "settings", "told"),
    [
        (vit, {}, "fractrain export run --to onnx"),
        (vit, {"method": "fractrain"}, "fractrain export run --to onnx --commonest"),
        (vit, {"format": "mx"}, "fractrain export run --to torchao"),
        (llama, {"format": "fp8"}, "fractrain export run --to compressed-tensors"),
        (Convolutions, {"format": "mx"}, "no exported file"),
        (vit, {"format": "wageubn"}, "no exported file"),
        (vit, {"affine": AffineConfig(ranges="sample")}, "fractrain export run --to onnx"),
        (vit, {"precision": "10/12"}, "computes it here: blocks.0.attn.qkv has 10 bits"),
        (vit, {"method": "dfq", "options": ["3/6", "10/12"]}, "computes it here: blocks.0.attn.qkv has 10 bits"),
    ],
)
def test_the_command_that_is_named_is_one_that_holds_the_precision(build: Any, settings: Any, told: str) -> None:
    inputs = (torch.randn(2, 3, 32, 32),) if build is Convolutions else ()
    assert told in deployment(Path("run"), rewritten(build(), *inputs, **{"method": "static"} | settings))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_of_another_type_than_float32_names_no_command_that_refuses_it(dtype: Any, tmp_path: Path) -> None:
    linears = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)]
    model = rewritten(nn.Sequential(*linears).to(dtype), torch.randn(2, 8, dtype=dtype))
    assert "computes it here: 2 computes in" in deployment(Path("run"), model)
    with pytest.raises(ExportError, match=f"2 computes in {str(dtype).removeprefix('torch.')}, and QuantizeLinear"):
        model.export(tmp_path / "onnx")
    with (
        pytest.raises(ExportError, match="computes in float64, which torchao")
        if dtype == torch.float64
        else nullcontext()
    ):
        model.export(tmp_path / "torchao", format="torchao")
    assert [path.name for path in tmp_path.iterdir()] == (["torchao"] if dtype == torch.bfloat16 else [])


def test_a_float_run_names_no_command() -> None:
    assert deployment(Path("run"), build_rewritten(vit(), method="float")) == ""


@pytest.mark.long
def test_gates_of_a_run_are_fixed_on_its_test_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    train = ["--method", "dfq", "--targets", "3.5", "--schedule", "manual", "--epochs", "1"]
    assert main(["train", *QUICK, *train, "--out", str(run)]) == 0
    assert main(["export", str(run), "--to", "onnx"]) == 2
    assert "commonest" in capsys.readouterr().err
    assert main(["export", str(run), "--to", "onnx", "--commonest"]) == 0
    assert "takes accuracy from" in capsys.readouterr().out
    assert main(["export", str(run), "--to", "onnx", "--stage", "8/8", "--out", str(tmp_path / "out")]) == 0


@torch.no_grad()
def test_a_saved_model_of_transformers_needs_no_code(tmp_path: Path) -> None:
    model = rewritten(bert(), attention="float", format="fp8")
    model.save_pretrained(tmp_path / "saved")
    assert main(["export", str(tmp_path / "saved"), "--to", "compressed-tensors", "--out", str(tmp_path / "out")]) == 0
    again = type(model._state.original).from_pretrained(tmp_path / "out")  # type: ignore[attr-defined]
    inputs = dict(model._state.recording.kwargs)
    assert difference(model(**inputs), again(**inputs)) < 1e-5


@pytest.mark.long
def test_a_saved_timm_model_names_its_architecture_where_that_says_enough(tmp_path: Path) -> None:
    import timm

    model = rewritten(timm.create_model("resnet10t", num_classes=3), torch.randn(2, 3, 32, 32))
    model.save_pretrained(tmp_path / "named")
    again = FracModel.from_pretrained(tmp_path / "named", model=architecture_in(tmp_path / "named")).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(x), again(x)) and torch.equal(model.deployed()(x), again.deployed()(x))
    rewritten(vit()).save_pretrained(tmp_path / "changed")  # with sizes that its name does not say
    with pytest.raises(FracTrainError):
        FracModel.from_pretrained(tmp_path / "changed", model=architecture_in(tmp_path / "changed"))


def test_a_saved_model_of_another_schema_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewritten(bert(), attention="float").save_pretrained(tmp_path)
    recipe = tmp_path / "fractrain_fx.json"
    recipe.write_text(json.dumps(json.loads(recipe.read_text()) | {"fractrain_fx": 2}))
    assert main(["export", str(tmp_path), "--to", "onnx"]) == 2
    assert "schema 2, and this version of the package reads 1" in " ".join(capsys.readouterr().err.split())


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="neither a run"):
        architecture_in(tmp_path)
    rewritten(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), torch.randn(2, 4)
    ).save_pretrained(tmp_path)
    with pytest.raises(RunError, match="--model"):
        architecture_in(tmp_path)
