"""Guessed example inputs: the model accepts them, the padding is real, and what cannot be guessed is said."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers as hf
from torch import nn

from fractrain_fx.capture.inputs.examples import example_inputs
from fractrain_fx.errors import InputError

TINY: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
TEXT: dict[str, Any] = {**TINY, "vocab_size": 99}
IMAGE: dict[str, Any] = {**TINY, "image_size": 32, "patch_size": 8}
SPEECH: dict[str, Any] = {
    **TEXT,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 8),
    "conv_stride": (10, 32),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}
WHISPER: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": 32,
    **{f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("attention_heads", 2))},
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_source_positions": 20,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
    "bos_token_id": 3,
    "eos_token_id": 4,
}
BART: dict[str, Any] = {key: value for key, value in WHISPER.items() if key != "max_source_positions"}
T5: dict[str, Any] = {"vocab_size": 99, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
T5["decoder_start_token_id"] = 0
SEGFORMER: dict[str, Any] = {
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "decoder_hidden_size": 16,
    "image_size": 32,
}
MIXTRAL: dict[str, Any] = {**TEXT, "num_key_value_heads": 1, "num_local_experts": 2}

MODELS = {
    "BertForSequenceClassification": lambda: hf.BertConfig(**TEXT),
    "BertForTokenClassification": lambda: hf.BertConfig(**TEXT),
    "BertForQuestionAnswering": lambda: hf.BertConfig(**TEXT),
    "BertForMaskedLM": lambda: hf.BertConfig(**TEXT),
    "RobertaForMaskedLM": lambda: hf.RobertaConfig(**TEXT, max_position_embeddings=16),
    "FNetForMaskedLM": lambda: hf.FNetConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1, intermediate_size=32),
    "GPT2LMHeadModel": lambda: hf.GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=2),
    "MixtralForCausalLM": lambda: hf.MixtralConfig(**MIXTRAL),
    "T5ForConditionalGeneration": lambda: hf.T5Config(**T5),
    "BartForSequenceClassification": lambda: hf.BartConfig(**BART),
    "XLNetLMHeadModel": lambda: hf.XLNetConfig(vocab_size=99, d_model=32, n_layer=1, n_head=2, d_inner=32),
    "ViTForImageClassification": lambda: hf.ViTConfig(**IMAGE),
    "SegformerForSemanticSegmentation": lambda: hf.SegformerConfig(**SEGFORMER),
    "VideoMAEForVideoClassification": lambda: hf.VideoMAEConfig(**IMAGE, num_frames=4),
    "TimesformerForVideoClassification": lambda: hf.TimesformerConfig(**IMAGE, num_frames=4),
    "Wav2Vec2ForCTC": lambda: hf.Wav2Vec2Config(**SPEECH, feat_extract_norm="layer"),
    "ASTForAudioClassification": lambda: hf.ASTConfig(**TINY, max_length=64, num_mel_bins=32),
    "WhisperForConditionalGeneration": lambda: hf.WhisperConfig(**WHISPER),
}
ONLY_OUTPUTS = {
    "CLIPModel": lambda: hf.CLIPConfig(text_config=TEXT, vision_config=IMAGE, projection_dim=16),
    "BartModel": lambda: hf.BartConfig(**BART),
}


def build(name: str) -> nn.Module:
    return getattr(hf, name)((MODELS | ONLY_OUTPUTS)[name]())


@pytest.mark.parametrize("name", [*MODELS, *ONLY_OUTPUTS])
def test_hugging_face_models_accept_their_inputs_and_labels_put_the_loss_inside(name: str) -> None:
    model = build(name)
    for batch in (1, 3):
        args, kwargs = example_inputs(model, batch=batch)
        assert args == ()
        assert all(value.shape[0] == batch for value in kwargs.values())
        model(**kwargs)
    if name in ONLY_OUTPUTS:
        return
    _, kwargs = example_inputs(model, labels=True)
    assert "decoder_input_ids" not in kwargs
    loss = model(**kwargs).loss
    assert loss.isfinite()
    loss.backward()


@pytest.mark.parametrize("name", ["BertForMaskedLM", "GPT2LMHeadModel", "T5ForConditionalGeneration", "Wav2Vec2ForCTC"])
def test_the_last_sample_is_padded_and_the_first_is_full(name: str) -> None:
    _, kwargs = example_inputs(build(name))
    mask = kwargs["attention_mask"]
    assert mask[0].all() and mask[-1, 0] and not mask[-1].all()


def test_padding_bears_the_pad_token_follows_the_end_and_gives_no_loss() -> None:
    model = hf.BertForMaskedLM(hf.BertConfig(**TEXT, pad_token_id=7, eos_token_id=8))
    _, kwargs = example_inputs(model, labels=True)
    padded = kwargs["attention_mask"] == 0
    assert (kwargs["input_ids"][padded] == 7).all() and (kwargs["input_ids"][~padded] != 7).all()
    assert ((kwargs["input_ids"] == 8).sum(1) == 1).all()
    assert (kwargs["labels"][padded] == -100).all()


def test_special_tokens_beyond_a_small_vocabulary_are_left_out() -> None:
    config = hf.GPT2Config(vocab_size=20, n_embd=32, n_layer=1, n_head=2)
    assert config.eos_token_id == 50256
    assert example_inputs(hf.GPT2LMHeadModel(config))[1]["input_ids"].max() < 20


@pytest.mark.parametrize(("classes", "problem"), [(1, None), (3, "regression"), (3, "multi_label_classification")])
def test_labels_fit_the_problem(classes: int, problem: str | None) -> None:
    config = hf.ViTConfig(**IMAGE | {"num_labels": classes, "problem_type": problem})
    model = hf.ViTForImageClassification(config)
    assert model(**example_inputs(model, labels=True)[1]).loss.isfinite()


def test_a_model_without_a_head_has_no_labels() -> None:
    assert example_inputs(hf.BertModel(hf.BertConfig(**TEXT)), labels=True)[1].keys() == {
        "input_ids",
        "attention_mask",
    }


@pytest.mark.parametrize(
    ("name", "changes", "shape"),
    [
        ("resnet10t", {}, (3, 176, 176)),
        ("resnet10t", {"in_chans": 1}, (1, 176, 176)),
        ("resnet10t", {"features_only": True, "in_chans": 5}, (5, 176, 176)),
        ("vit_tiny_patch16_224", {"img_size": 96, "in_chans": 4, "depth": 1}, (4, 96, 96)),
        ("levit_128s", {}, (3, 224, 224)),
    ],
)
def test_timm_models_accept_their_inputs(name: str, changes: dict[str, Any], shape: tuple[int, ...]) -> None:
    model = timm.create_model(name, **changes)
    (x,), kwargs = example_inputs(model)
    assert (tuple(x.shape), kwargs) == ((2, *shape), {})
    model(x)


@pytest.mark.parametrize(("name", "side"), [("squeezenet1_1", 224), ("inception_v3", 299)])
def test_torchvision_models_accept_their_inputs(name: str, side: int) -> None:
    model = torchvision.models.get_model(name, weights=None, **({"init_weights": False} if side == 299 else {}))
    (x,), _ = example_inputs(model)
    assert x.shape == (2, 3, side, side)
    model(x)


def test_the_inputs_are_the_same_each_time_and_leave_the_random_state_alone() -> None:
    model = build("GPT2LMHeadModel")
    state = torch.get_rng_state()
    (_, one), (_, two) = example_inputs(model), example_inputs(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_inputs_follow_the_model_to_its_device_and_type() -> None:
    (x,), _ = example_inputs(timm.create_model("resnet10t").to("meta", torch.bfloat16))
    assert (x.device.type, x.dtype) == ("meta", torch.bfloat16)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 2)),
        lambda: torchvision.models.detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None),
    ],
)
def test_unknown_models_are_told_to_bring_inputs(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(InputError, match="example_inputs="):
        example_inputs(make())


def test_hugging_face_models_that_do_not_say_what_they_take_are_told_to_bring_inputs() -> None:
    with pytest.raises(InputError, match="bool_masked_pos"):
        example_inputs(hf.VideoMAEForPreTraining(hf.VideoMAEConfig(**IMAGE, num_frames=4)))
    with pytest.raises(InputError, match="image"):
        example_inputs(
            hf.LlavaForConditionalGeneration(
                hf.LlavaConfig(text_config=hf.LlamaConfig(**TEXT), vision_config=hf.CLIPVisionConfig(**IMAGE))
            )
        )


@pytest.mark.long
def test_neither_library_is_imported_for_a_model_of_none() -> None:
    script = (
        "import sys, torch\n"
        "from fractrain_fx.capture.inputs.examples import example_inputs\n"
        "try: example_inputs(torch.nn.Linear(2, 2))\n"
        "except TypeError: print(sorted({'timm', 'transformers', 'torchvision'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
