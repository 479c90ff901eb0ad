"""How many blocks each architecture has: worked out from its source, not read off a run."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import timm
import torch
import transformers

from fractrain_fx import FracModel, fractrainify
from fractrain_fx.capture.inputs.examples import example_inputs
from tests.build import rewritten
from tests.models import thinned

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGE = {name: size for name, size in TEXT.items() if name[-3:] != "_id" and name != "vocab_size"}
IMAGE |= {"image_size": 32, "patch_size": 8}
SIDES = ("encoder", "decoder")
WHISPER = {
    **{key: value for key, value in TEXT.items() if key in ("vocab_size", "pad_token_id", "bos_token_id")},
    **{f"{side}_layers": 4 for side in SIDES},
    **{f"{side}_attention_heads": 4 for side in SIDES},
    **{f"{side}_ffn_dim": 64 for side in SIDES},
    **{"d_model": 32, "max_source_positions": 32, "max_target_positions": 32, "num_mel_bins": 16},
    **{"eos_token_id": 2, "decoder_start_token_id": 1},
}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
WAV2VEC2 = {
    **TEXT,
    **{"conv_dim": (16, 16), "conv_kernel": (10, 8), "conv_stride": (10, 32), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer"},
    # A layer that is dropped by chance is a branch that no graph holds.
    **{"apply_spec_augment": False, "layerdrop": 0.0},
}


@functools.cache
def timm_model(name: str) -> FracModel:
    with torch.device("meta"):
        return rewrite(timm.create_model(name, num_classes=10))


def hugging_face(name: str, **sizes: Any) -> FracModel:
    kind = getattr(transformers, name)
    return rewrite(kind(kind.config_class(**sizes)))


def rewrite(model: torch.nn.Module) -> FracModel:
    args, kwargs = example_inputs(model)
    return rewritten(model, *args, keywords=kwargs, method="pfq")


def kinds(model: FracModel) -> dict[str | None, int]:
    return dict(Counter(block.skip for block in model.blocks))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # 24 layers and 2 on the class token, attention and MLP each. Besides: patches, head.
        pytest.param("cait_xxs24_224", {"identity": (24 + 2) * 2, None: 2}, marks=pytest.mark.slow),
        # 12 MLPs: the mixers pool and weigh nothing. Stages 3 and 4 (6 + 2 layers) scale their skip path.
        # Besides: stem, 3 downsamplings, head.
        pytest.param(
            "poolformerv2_s12", {"identity": 2 + 2, "projection": 6 + 2, None: 1 + 3 + 1}, marks=pytest.mark.long
        ),
        # Depths 1, 1, 4, 7; the first block of each stage strides, so its skip path is a 1x1 convolution.
        ("regnety_002", {"identity": 0 + 0 + 3 + 6, "projection": 4, None: 2}),
        # Layer 1 is one bottleneck with a projection; then one module of 2, of 3 and of 4 branches with 2 basic blocks
        # each; 4 bottlenecks with projections before the head. What is fused comes from other branches.
        pytest.param("hrnet_w18_small", {"identity": (2 + 3 + 4) * 2, "projection": 1 + 4}, marks=pytest.mark.slow),
        # 8 serial and 18 (6 x 3 scales) parallel layers, each with a residual depthwise position encoding and an MLP.
        # Only the serial ones keep their attention: in the parallel ones it is also scaled into the other scales.
        pytest.param("coat_tiny", {"identity": 8 * 3 + 18 * 2}, marks=pytest.mark.slow),
        # Concatenations are no sums.
        pytest.param("densenet121", {}, marks=pytest.mark.long),
        ("vgg11", {None: 8 + 1 + 1}),  # convolutions, the two of pre_logits together, head
        # Ghost bottlenecks: 16, of which 5 change stride or width.
        pytest.param("ghostnet_050", {"identity": 11, "projection": 5}, marks=pytest.mark.long),
    ],
)
def test_blocks_of_timm_models(name: str, expected: dict[str | None, int]) -> None:
    found = kinds(timm_model(name))
    assert {kind: found.get(kind, 0) for kind in ("identity", "projection")} == {
        kind: expected.get(kind, 0) for kind in ("identity", "projection")
    }
    assert None not in expected or found[None] == expected[None]


@pytest.mark.long
def test_the_class_token_of_cait_is_carried_past_a_block_that_reads_the_image() -> None:
    model = timm_model("cait_xxs24_224")
    first = next(block for block in model.blocks if block.name == "blocks_token_only.0")
    assert first.entry == next(block for block in model.blocks if block.name == "blocks.23_1").exit
    assert len(first.ops) == 6


@pytest.mark.parametrize(
    ("name", "sizes", "identity"),
    thinned(
        [
            # Attention and MLP of each layer; with attention to the encoder, three.
            ("WhisperForConditionalGeneration", WHISPER, 4 * 2 + 4 * 3),
            ("CLIPModel", {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16}, (2 + 2) * 2),
            (
                "SwinForImageClassification",
                {
                    "image_size": 32,
                    "patch_size": 2,
                    "embed_dim": 16,
                    "depths": [2, 2],
                    "num_heads": [2, 4],
                    "window_size": 4,
                },
                (2 + 2) * 2,
            ),
            # The convolution over positions is added to what it reads, too.
            ("Wav2Vec2ForCTC", WAV2VEC2, 1 + 2 * 2),
            ("Wav2Vec2ForCTC", WAV2VEC2 | {"do_stable_layer_norm": True}, 1 + 2 * 2),
            ("Gemma2ForCausalLM", TEXT | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8}, 2 * 2),
            (
                "DebertaV2ForSequenceClassification",
                TEXT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_position_embeddings": 32},
                2 * 2,
            ),
            ("AlbertForSequenceClassification", TEXT | {"embedding_size": 16}, 2 * 2),
            ("FalconForCausalLM", TEXT | {"parallel_attn": False}, 2 * 2),
            # The state-space mixer is the only branch; the skip path is cast to float32.
            ("MambaForCausalLM", TEXT | {"state_size": 4}, 2),
        ],
        3,
    ),
)
def test_blocks_of_hugging_face_models(name: str, sizes: dict[str, Any], identity: int) -> None:
    found = kinds(hugging_face(name, **sizes))
    assert found["identity"] == identity
    assert "projection" not in found


GPTJ = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 32}
PARALLEL = [
    # Query, key and value in one product, 2 products of the attention, its output; 2 of the MLP.
    ("FalconForCausalLM", TEXT, 1 + 2 + 1 + 2),
    ("FalconForCausalLM", TEXT | {"new_decoder_architecture": True, "num_kv_heads": 2}, 1 + 2 + 1 + 2),
    # Query, key, value apart; a gated MLP has 3.
    ("CohereForCausalLM", TEXT | {"num_key_value_heads": 2}, 3 + 2 + 1 + 3),
    ("GPTJForCausalLM", {**GPTJ, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}, 3 + 2 + 1 + 2),
]


@pytest.mark.parametrize(("name", "sizes", "ops"), thinned(PARALLEL, 2))
def test_attention_and_mlp_side_by_side_are_one_block(name: str, sizes: dict[str, Any], ops: int) -> None:
    found = [block for block in hugging_face(name, **sizes).blocks if block.skip]
    assert [(block.skip, len(block.ops)) for block in found] == [("identity", ops)] * 2


def test_layers_that_share_their_weights_have_one_rounding_and_a_gate_for_each_use() -> None:
    model = transformers.AlbertForSequenceClassification(transformers.AlbertConfig(**TEXT, embedding_size=16))
    _, kwargs = example_inputs(model)
    rewritten = fractrainify(model, example_kwargs=kwargs, check=False)
    layers = [block for block in rewritten.blocks if block.skip]
    assert all(block.gated for block in layers) and len(layers) == 4
    gates = {str(node.target) for node in rewritten.graph.nodes if str(node.target).startswith("frac.gates.")}
    assert len(gates) == sum(block.gated for block in rewritten.blocks)
    called = [str(node.target) for node in rewritten.graph.nodes if node.op == "call_module"]
    weights = [name for name in called if name.startswith("frac.quant.") and name.endswith(".weight")]
    assert len(weights) == len(set(weights)) == 8  # 6 of the layer, the projection of the embeddings and the pooler
