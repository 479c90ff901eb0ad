"""Denoisers, autoencoders and other generators of images, video and sound."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.coverage.libraries.entry import Entry, Module, features, image

__all__ = ["ENTRIES"]

_denoising = Module("denoising_diffusion_pytorch")
_diffusers = Module("diffusers")

_TIMES = (3, 7)


def _times() -> torch.Tensor:
    return torch.tensor(_TIMES)


_BLOCKS: dict[str, Any] = {
    "sample_size": 32,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
}
_ENCODER: dict[str, Any] = {"block_out_channels": (16, 32), "norm_num_groups": 8, "latent_channels": 4}


def _conditional() -> nn.Module:
    made: nn.Module = _diffusers.UNet2DConditionModel(
        **_BLOCKS,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
    )
    return made


def _conditioned(side: int = 32) -> dict[str, Any]:
    return {"sample": image(4, side, side), "timestep": _times(), "encoder_hidden_states": features(6, 32)}


def _gaussian() -> nn.Module:
    unet = _denoising.Unet(dim=16, dim_mults=(1, 2), attn_heads=2, attn_dim_head=16)
    made: nn.Module = _denoising.GaussianDiffusion(unet, image_size=32, timesteps=10)
    return made


ENTRIES = (
    Entry(
        "diffusers",
        "UNet2DModel",
        lambda: _diffusers.UNet2DModel(
            **_BLOCKS,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=8,
        ),
        lambda: (image(3, 32, 32), _times()),
    ),
    Entry("diffusers", "UNet2DConditionModel", _conditional, _conditioned),
    Entry(
        "diffusers",
        "UNet1DModel",
        lambda: _diffusers.UNet1DModel(
            sample_size=64,
            in_channels=2,
            out_channels=2,
            extra_in_channels=64,
            block_out_channels=(32, 32),
            down_block_types=("DownBlock1DNoSkip", "AttnDownBlock1D"),
            up_block_types=("AttnUpBlock1D", "UpBlock1DNoSkip"),
        ),
        lambda: (torch.randn(2, 2, 64), _times()),
    ),
    Entry(
        "diffusers",
        "UNet3DConditionModel",
        lambda: _diffusers.UNet3DConditionModel(
            **_BLOCKS,
            down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
            cross_attention_dim=32,
            attention_head_dim=8,
        ),
        lambda: _conditioned() | {"sample": torch.randn(2, 4, 3, 16, 16)},
    ),
    Entry(
        "diffusers",
        "DiTTransformer2DModel",
        lambda: _diffusers.DiTTransformer2DModel(
            num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=16, norm_num_groups=8
        ),
        lambda: {"hidden_states": image(4, 16, 16), "timestep": _times(), "class_labels": torch.tensor([1, 4])},
    ),
    Entry(
        "diffusers",
        "PixArtTransformer2DModel",
        lambda: _diffusers.PixArtTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=8,
            num_layers=2,
            sample_size=16,
            cross_attention_dim=32,
            caption_channels=32,
            norm_num_groups=8,
            use_additional_conditions=False,
        ),
        lambda: {
            "hidden_states": image(4, 16, 16),
            "timestep": _times(),
            "encoder_hidden_states": features(6, 32),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    Entry(
        "diffusers",
        "FluxTransformer2DModel",
        lambda: _diffusers.FluxTransformer2DModel(
            in_channels=8,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=(4, 4, 8),
            guidance_embeds=True,
        ),
        lambda: {
            "hidden_states": features(16, 8),
            "encoder_hidden_states": features(6, 32),
            "pooled_projections": torch.randn(2, 32),
            "timestep": torch.rand(2),
            "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)),
            "txt_ids": torch.zeros(6, 3),
            "guidance": torch.ones(2),
        },
    ),
    Entry(
        "diffusers",
        "SD3Transformer2DModel",
        lambda: _diffusers.SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            caption_projection_dim=32,
            pooled_projection_dim=32,
            pos_embed_max_size=32,
        ),
        lambda: {
            "hidden_states": image(4, 16, 16),
            "encoder_hidden_states": features(6, 32),
            "pooled_projections": torch.randn(2, 32),
            "timestep": torch.rand(2),
        },
    ),
    Entry(
        "diffusers",
        "AutoencoderKL",
        lambda: _diffusers.AutoencoderKL(
            **_ENCODER, down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2
        ),
        lambda: (image(3, 32, 32),),
    ),
    Entry(
        "diffusers",
        "VQModel",
        lambda: _diffusers.VQModel(
            **_ENCODER,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            num_vq_embeddings=32,
        ),
        lambda: (image(3, 32, 32),),
    ),
    Entry(
        "diffusers",
        "AutoencoderTiny",
        lambda: _diffusers.AutoencoderTiny(
            encoder_block_out_channels=(16,) * 4,
            decoder_block_out_channels=(16,) * 4,
            num_encoder_blocks=(1,) * 4,
            num_decoder_blocks=(1,) * 4,
        ),
        lambda: (image(3, 32, 32),),
    ),
    Entry(
        "diffusers",
        "AutoencoderOobleck",
        lambda: _diffusers.AutoencoderOobleck(
            encoder_hidden_size=16,
            downsampling_ratios=[2, 4],
            channel_multiples=[1, 2],
            decoder_channels=16,
            decoder_input_channels=8,
        ),
        lambda: (torch.randn(2, 2, 64),),
    ),
    Entry(
        "denoising-diffusion-pytorch",
        "Unet",
        lambda: _denoising.Unet(dim=16, dim_mults=(1, 2)),
        lambda: (image(3, 32, 32), _times()),
    ),
    Entry("denoising-diffusion-pytorch", "GaussianDiffusion", _gaussian, lambda: (torch.rand(2, 3, 32, 32),)),
    Entry(
        "denoising-diffusion-pytorch",
        "Unet1D",
        lambda: _denoising.Unet1D(dim=16, dim_mults=(1, 2), channels=4),
        lambda: (torch.randn(2, 4, 32), _times()),
    ),
    Entry(
        "denoising-diffusion-pytorch",
        "KarrasUnet",
        lambda: _denoising.KarrasUnet(
            image_size=32, dim=16, dim_max=32, num_downsamples=1, num_blocks_per_stage=1, attn_res=16, fourier_dim=8
        ),
        lambda: (image(4, 32, 32), torch.rand(2)),
    ),
)
