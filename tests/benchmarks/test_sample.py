"""Thirty models of the three libraries: every check of `make coverage`, and a training step in each block format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.coverage.cases import Ready
from benchmarks.coverage.trial import examine, passed
from fractrain_fx import FracConfig, fractrainify
from fractrain_fx.capture.inputs.examples import example_inputs
from tests.models import marks

# timm's own small ones, one for each family of layers, and those whose structure has none of these.
TIMM: dict[str, dict[str, Any]] = {
    **{f"test_{name}": {} for name in ("resnet", "byobnet", "convnext", "efficientnet_gn", "mambaout", "efficientnet")},
    **{f"test_{name}": {} for name in ("nfnet", "convnext2", "convnext3", "efficientnet_ln")},
    "test_vit3": {"img_size": 64},
    "cait_xxs24_224": {"img_size": 64, "depth": 1},
    "ghostnet_050": {},
    "xcit_nano_12_p16_224": {"img_size": 64, "depth": 1},
}
_TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_IMAGE = {name: size for name, size in _TEXT.items() if name != "vocab_size"} | {"image_size": 32, "patch_size": 8}
_DECODER = {"d_model": 32, **{f"{side}_layers": 1 for side in ("encoder", "decoder")}}
_DECODER |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
_DECODER |= {f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")} | {"vocab_size": 64, "decoder_start_token_id": 1}
HUGGING_FACE: dict[str, dict[str, Any]] = {
    "AlbertForSequenceClassification": {**_TEXT, **_IDS, "embedding_size": 16},
    "BloomForCausalLM": {**_IDS, "vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "CLIPModel": {"text_config": {**_TEXT, **_IDS}, "vision_config": _IMAGE, "projection_dim": 16},
    "DebertaV2ForSequenceClassification": {**_TEXT, **_IDS, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "FalconForCausalLM": {**_TEXT, **_IDS},
    "Gemma2ForCausalLM": {**_TEXT, **_IDS, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8},
    "MambaForCausalLM": {**_TEXT, **_IDS, "state_size": 4},
    "RobertaForTokenClassification": {**_TEXT, **_IDS, "max_position_embeddings": 40},
    "SegformerForSemanticSegmentation": {
        **{"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16, "image_size": 32},
        **{"num_labels": 5},
    },
    "SwinForImageClassification": {
        **{"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    },
    "WhisperForConditionalGeneration": {
        **{**_DECODER, **_IDS, "max_source_positions": 32, "max_target_positions": 32, "num_mel_bins": 16},
    },
    "ASTForAudioClassification": {**_IMAGE, "max_length": 64, "num_mel_bins": 32},
}
TORCHVISION: dict[str, dict[str, Any]] = {
    "mobilenet_v3_small": {},
    "shufflenet_v2_x0_5": {},
    "squeezenet1_1": {},
    "mnasnet0_5": {},
}


def timm_model(name: str) -> Ready:
    import timm

    def make() -> nn.Module:
        made: nn.Module = timm.create_model(name, num_classes=10, drop_rate=0.1, **TIMM[name])
        return made

    return ready(make, (torch.randn(2, 3, 64, 64),))


def hugging_face_model(name: str) -> Ready:
    import transformers

    def make() -> nn.Module:
        kind = getattr(transformers, name)
        made: nn.Module = kind(kind.config_class(**HUGGING_FACE[name]))
        return made

    _, kwargs = example_inputs(make(), labels="Model" not in name[-5:])
    return ready(make, (), kwargs)


def torchvision_model(name: str) -> Ready:
    import torchvision

    def make() -> nn.Module:
        made: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=10, **TORCHVISION[name])
        return made

    return ready(make, (torch.randn(2, 3, 64, 64),))


def ready(make: Callable[[], nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Ready:
    return Ready(make(), make, args, kwargs or {})


SAMPLE = [
    *((timm_model, name) for name in TIMM),
    *((hugging_face_model, name) for name in HUGGING_FACE),
    *((torchvision_model, name) for name in TORCHVISION),
]


def test_the_sample_has_thirty_models() -> None:
    assert len(SAMPLE) == 30


# One runs with all tests, four of other kinds and libraries with the long ones, and the rest with the slow ones.
QUICK = ("test_resnet",)
LONG = ("AlbertForSequenceClassification", "squeezenet1_1", "test_nfnet", "WhisperForConditionalGeneration")
SLOW = {name for _, name in SAMPLE} - {*QUICK, *LONG}

MODELS = [pytest.param(*each, id=each[1], marks=marks(each[1], LONG, SLOW)) for each in SAMPLE]


@pytest.mark.parametrize(("build", "name"), MODELS)
def test_every_check_is_made_and_holds(build: Callable[[str], Ready], name: str) -> None:
    row = examine(lambda: build(name))
    assert passed(row), (row.get("failed_at"), row.get("cause"))


@pytest.mark.parametrize(("fmt", "precision"), [("mx", "4/4"), ("nvfp4", "4/4"), ("fp8", "8/8")])
@pytest.mark.parametrize(("build", "name"), MODELS)
def test_a_step_in_a_block_format_is_finite_and_moves_the_model(
    build: Callable[[str], Ready], name: str, fmt: str, precision: str
) -> None:
    torch.manual_seed(0)
    ready = build(name)
    config = FracConfig(method="static", format=fmt, precision=precision)
    model = fractrainify(
        ready.model, config=config, example_inputs=ready.args, example_kwargs=ready.kwargs, check=False
    )
    # Besides the layers that are float in every format, none stays float because this one has no form for it.
    assert not [op.name for op in model.ops if "has no form" in op.precision.reason]
    assert any(op.precision.mode == "scheduled" for op in model.ops)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    loss = loss_of(model.train()(*ready.args, **ready.kwargs))
    loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert loss.isfinite()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
    assert any(not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def loss_of(outputs: Any) -> Tensor:
    """The model's own loss if it was given labels, else the mean square of what it returns."""
    if isinstance(outputs, Tensor):
        return outputs.square().mean()
    own: Tensor | None = getattr(outputs, "loss", None)
    return outputs.logits_per_image.square().mean() if own is None else own
