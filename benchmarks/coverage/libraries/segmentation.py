"""Dense prediction on images and volumes, and the medical models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.coverage.libraries.entry import Entry, Module, image

__all__ = ["ENTRIES"]

_monai = Module("monai.networks.nets")
_smp = Module("segmentation_models_pytorch")

_OPTIONS: dict[str, Any] = {"encoder_name": "resnet18", "encoder_weights": None, "classes": 3}


def _segmenter(name: str, side: int = 64, **options: Any) -> Entry:
    def make() -> nn.Module:
        made: nn.Module = getattr(_smp, name)(**_OPTIONS | options)
        return made

    return Entry("segmentation-models-pytorch", name, make, lambda: (image(3, side, side),))


ENTRIES = (
    *map(_segmenter, ("Unet", "UnetPlusPlus", "FPN", "PSPNet", "Linknet", "DeepLabV3Plus", "MAnet")),
    _segmenter("Segformer", encoder_name="mit_b0"),
    _segmenter("UPerNet"),
    _segmenter("PAN", side=128),
    Entry(
        "monai",
        "UNet",
        lambda: _monai.UNet(3, 1, 2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1),
        lambda: (image(1, 32, 32, 32),),
    ),
    Entry(
        "monai",
        "SegResNet",
        lambda: _monai.SegResNet(3, init_filters=8, blocks_down=(1, 1, 1), blocks_up=(1, 1)),
        lambda: (image(1, 32, 32, 32),),
    ),
    Entry(
        "monai",
        "SwinUNETR",
        lambda: _monai.SwinUNETR(
            1, 2, patch_size=2, depths=(1, 1, 1, 1), num_heads=(1, 2, 4, 8), feature_size=12, spatial_dims=2
        ),
        lambda: (image(1, 64, 64),),
    ),
    Entry(
        "monai",
        "UNETR",
        lambda: _monai.UNETR(1, 2, img_size=32, feature_size=8, hidden_size=48, mlp_dim=96, num_heads=4),
        lambda: (image(1, 32, 32, 32),),
    ),
    Entry("monai", "DenseNet121", lambda: _monai.DenseNet121(2, 1, 10), lambda: (image(1, 64, 64),)),
    Entry(
        "monai",
        "AttentionUnet",
        lambda: _monai.AttentionUnet(2, 1, 2, channels=(8, 16, 32), strides=(2, 2)),
        lambda: (image(1, 64, 64),),
    ),
    Entry(
        "monai",
        "BasicUNetPlusPlus",
        lambda: _monai.BasicUNetPlusPlus(2, 1, 2, features=(8, 8, 16, 16, 32, 8)),
        lambda: (image(1, 64, 64),),
    ),
    Entry(
        "monai",
        "DynUNet",
        lambda: _monai.DynUNet(2, 1, 2, (3, 3, 3), (1, 2, 2), (2, 2), filters=(8, 16, 32)),
        lambda: (image(1, 64, 64),),
    ),
    Entry(
        "monai",
        "DiffusionModelUNet",
        lambda: _monai.DiffusionModelUNet(
            2, 1, 1, num_res_blocks=1, channels=(8, 16), attention_levels=(False, True), norm_num_groups=4
        ),
        lambda: {"x": image(1, 32, 32), "timesteps": torch.tensor([3, 7])},
    ),
    Entry(
        "monai",
        "VQVAE",
        lambda: _monai.VQVAE(
            2,
            1,
            1,
            channels=(8, 16),
            num_res_layers=1,
            num_res_channels=(8, 16),
            downsample_parameters=((2, 4, 1, 1), (2, 4, 1, 1)),
            upsample_parameters=((2, 4, 1, 1, 0), (2, 4, 1, 1, 0)),
            ddp_sync=False,
        ),
        lambda: (image(1, 32, 32),),
    ),
    Entry(
        "monai",
        "VoxelMorphUNet",
        lambda: _monai.VoxelMorphUNet(2, 2, 8, (8, 8, 16, 16), (8, 8)),
        lambda: (image(2, 64, 64),),
    ),
)
