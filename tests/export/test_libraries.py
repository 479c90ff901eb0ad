"""Folders that transformers loads with compressed-tensors, and states that torchao multiplies."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import FracModel, Pin, Precision
from fractrain_fx.config import AffineConfig
from fractrain_fx.errors import ExportError
from tests.deployable import Convolutions, bert, difference, gpt2, llama, rewritten, vit

pytest.importorskip("compressed_tensors", reason="needs the extra: pip install 'fractrain_fx[export]'")
pytest.importorskip("torchao", reason="needs the extra: pip install 'fractrain_fx[export]'")

FOUR = Precision(4, 4)


def call(model: FracModel) -> dict[str, Tensor]:
    return dict(model._state.recording.kwargs)


@torch.no_grad()
def loaded(model: FracModel, folder: Path, **options: Any) -> tuple[Any, Any]:
    """The difference of the loaded model from evaluation, and what the export said."""
    written = model.export(folder, format="compressed-tensors", **options)
    again = type(model._state.original).from_pretrained(folder)  # type: ignore[attr-defined]
    return difference(model(**call(model)), again(**call(model))), written


@pytest.mark.parametrize(
    ("settings", "options", "most"),
    [
        ({}, {}, 5e-3),  # a value in the middle of two levels may go to the other one
        ({"precision": FOUR}, {}, 1e-5),
        ({"format": "fp8"}, {}, 1e-5),
        ({"pins": [Pin("*.output.dense", FOUR)]}, {}, 5e-3),
    ],
    ids=["int8", "int4", "fp8", "mixed"],
)
def test_transformers_computes_what_evaluation_does(
    tmp_path: Path, settings: dict[str, Any], options: dict[str, Any], most: float
) -> None:
    found, written = loaded(rewritten(bert(), attention="float", **settings), tmp_path, **options)
    assert found < most
    groups = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["config_groups"]
    assert len(groups) == (2 if "pins" in settings else 1)
    assert not any("attention" in note for note in written.notes)


def test_integer_levels_pack_few_bits_and_give_what_deployed_gives(tmp_path: Path) -> None:
    model = rewritten(bert(), attention="float", precision=FOUR)
    model.export(tmp_path / "bytes", format="compressed-tensors")
    written = model.export(tmp_path / "packed", format="compressed-tensors", levels="integer")
    again: Any = type(model._state.original).from_pretrained(tmp_path / "packed")  # type: ignore[attr-defined]
    with torch.no_grad():
        assert difference(model.deployed(levels="integer")(**call(model)), again(**call(model))) < 1e-5
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("bytes", "packed")]
    assert sizes[1] < sizes[0] and written.notes == ()


@pytest.mark.parametrize(("ranges", "strategy"), [("row", "token"), ("head", "tensor")])
def test_ranges_are_measured_at_each_call(tmp_path: Path, ranges: Any, strategy: str) -> None:
    settings = {"affine": AffineConfig(ranges=ranges), "precision": Precision(6, 6), "attention": "float"}
    model = rewritten(llama(), **settings)
    model.export(tmp_path, format="compressed-tensors", levels="integer")
    again: Any = type(model._state.original).from_pretrained(tmp_path)  # type: ignore[attr-defined]
    inputs = call(model)
    inputs["input_ids"] = inputs["input_ids"].flip(1)
    with torch.no_grad():
        assert difference(model.deployed(levels="integer")(**inputs), again(**inputs)) < 1e-5
    group = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert group["input_activations"]["dynamic"] and group["input_activations"]["strategy"] == strategy


@pytest.mark.parametrize(
    ("build", "ranges", "levels", "words"),
    [
        (llama, "row", "exact", "levels='integer'"),
        (llama, "sample", "integer", "does not"),
        (bert, "row", "integer", "pooler"),  # its input has no tokens
    ],
)
def test_ranges_that_compressed_tensors_would_measure_otherwise_are_refused(
    tmp_path: Path, build: Any, ranges: Any, levels: Any, words: str
) -> None:
    model = rewritten(build(), affine=AffineConfig(ranges=ranges), attention="float")
    with pytest.raises(ExportError, match=words):
        model.export(tmp_path / "out", format="compressed-tensors", levels=levels)


@pytest.mark.parametrize(("format", "bits", "words"), [("mx", 8, "1.75"), ("mx", 4, "1.75"), ("nvfp4", 4, "fixed")])
def test_block_formats_load_with_the_weights_of_evaluation_and_say_what_is_otherwise(
    tmp_path: Path, format: str, bits: int, words: str
) -> None:
    from compressed_tensors.compressors import decompress_module

    model = rewritten(llama(), format=format, precision=Precision(bits, bits), attention="float")
    found, written = loaded(model, tmp_path, **({"batches": [call(model)]} if format == "nvfp4" else {}))
    assert found < 0.3 and any(words in note for note in written.notes)
    assert any("bfloat16" in note for note in written.notes)
    again: Any = type(model._state.original).from_pretrained(tmp_path)  # type: ignore[attr-defined]
    layer = again.model.layers[0].mlp.up_proj
    decompress_module(layer)
    ours: Any = model.deployed()
    assert difference([ours.model.layers[0].mlp.up_proj.weight], [layer.weight.float()]) < 2**-7  # bfloat16


def test_a_loaded_model_generates_the_tokens_of_the_deployed_one(tmp_path: Path) -> None:
    model = rewritten(llama(), method="pfq", attention="float")
    model.export(tmp_path, format="compressed-tensors", stage=-1)
    again: Any = type(model._state.original).from_pretrained(tmp_path)  # type: ignore[attr-defined]
    plain: Any = model.deployed(-1)
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = torch.randint(0, 32, (1, 4))
    assert again.generate(ids, **settings).tolist() == plain.generate(ids, **settings).tolist()


def test_attention_that_stays_float_is_named(tmp_path: Path) -> None:
    _, written = loaded(rewritten(llama()), tmp_path)
    assert any("self_attn.matmul_1" in note for note in written.notes)


def test_a_tied_embedding_stays_float(tmp_path: Path) -> None:
    model = rewritten(llama(), attention="float", pins=[Pin("lm_head", Precision(8, 8))])
    found, _ = loaded(model, tmp_path)
    assert found < 5e-3


@pytest.mark.parametrize(
    ("build", "settings", "options", "words"),
    [
        (Convolutions, {}, {"example": (2, 3, 8, 8)}, "models of transformers"),
        (gpt2, {}, {}, "Conv1D"),
        (llama, {"format": "nvfp4", "precision": FOUR}, {}, "batches"),
        (llama, {"precision": Precision(12, 12)}, {}, "2 to 8"),
        (llama, {"format": "mx", "precision": Precision(6, 6)}, {}, "4 and 8"),
        (llama, {"format": "int"}, {}, "square blocks"),
    ],
    ids=["convolutions", "conv1d", "nvfp4", "bits", "element", "integers"],
)
def test_what_compressed_tensors_lacks_is_refused_and_nothing_written(
    tmp_path: Path, build: Any, settings: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    inputs = [torch.randn(options["example"])] if options else []
    model = rewritten(build(), *inputs, **settings)
    with pytest.raises(ExportError, match=words):
        model.export(tmp_path / "out", format="compressed-tensors")
    assert not (tmp_path / "out").exists()


class TestTorchAO:
    @torch.no_grad()
    @pytest.mark.parametrize(
        ("settings", "most"),
        [({"format": "mx"}, 0), ({"format": "mx", "precision": FOUR}, 0), ({"format": "fp8"}, 0.05), ({}, 0.2)],
        ids=["mxfp8", "mxfp4", "fp8", "int8"],
    )
    def test_its_tensors_multiply(self, tmp_path: Path, settings: dict[str, Any], most: float) -> None:
        model = rewritten(vit(), attention="float", **settings)
        written = model.export(tmp_path, format="torchao")
        plain = copy.deepcopy(model._state.original)
        plain.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True), assign=True)
        x = torch.randn(2, 3, 32, 32)
        assert difference(model(x), plain(x)) <= most
        assert any("activations" in note for note in written.notes) == (not settings)

    @torch.no_grad()
    @pytest.mark.parametrize("build", [vit, bert])
    def test_integer_levels_multiply_codes_of_activations_too(self, tmp_path: Path, build: Any) -> None:
        model = rewritten(build(), attention="float")
        written = model.export(tmp_path, format="torchao", levels="integer")
        plain = copy.deepcopy(model._state.original)
        plain.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True), assign=True)
        recording, ours = model._state.recording, model.deployed(levels="integer")
        outputs = [each(*recording.args, **recording.kwargs) for each in (ours, plain)]
        assert difference(*outputs) < 5e-3 and written.notes == ()  # a value between two levels may take the other one

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"precision": FOUR}, "are"),
            ({"pins": [Pin("*fc1", FOUR)]}, "of blocks.0.mlp.fc1 are"),
        ],
        ids=["all", "some"],
    )
    def test_activations_of_few_bits_stay_float_and_the_note_says_which(
        self, tmp_path: Path, settings: dict[str, Any], words: str
    ) -> None:
        model = rewritten(vit(), attention="float", **settings)
        (note,) = model.export(tmp_path, format="torchao", levels="integer").notes
        assert note.startswith(f"activations {words} not rounded")

    @torch.no_grad()
    def test_codes_of_any_bits_have_the_values_of_evaluation(self, tmp_path: Path) -> None:
        model = rewritten(vit(), attention="float", precision=Precision(5, 8))
        model.export(tmp_path, format="torchao")
        state = torch.load(tmp_path / "model.pt", weights_only=True)
        weight: Any = state["blocks.0.mlp.fc1.weight"]
        ours: Any = model.deployed()
        assert difference([ours.blocks[0].mlp.fc1.weight], [weight.dequantize()]) < 1e-5

    def test_a_layer_that_its_tensors_cannot_multiply_is_named(self, tmp_path: Path) -> None:
        model = rewritten(bert(), attention="float", format="mx")
        with pytest.raises(ExportError, match=r"bert\.pooler\.dense cannot be multiplied"):
            model.export(tmp_path, format="torchao")

    def test_convolutions_are_refused(self, tmp_path: Path) -> None:
        model = rewritten(Convolutions(), torch.randn(2, 3, 8, 8))
        with pytest.raises(ExportError, match=r"not an nn\.Linear"):
            model.export(tmp_path / "out", format="torchao")
        assert isinstance(model._state.original, nn.Module) and not (tmp_path / "out").exists()
