"""Models that are measured and are not in a library by name."""

from __future__ import annotations

from torch import nn

__all__ = ["small_vit", "tiny_vit"]


def tiny_vit(num_classes: int = 10, image_size: int = 32) -> nn.Module:
    """Timm's ViT-Tiny (192 wide, 12 blocks, 3 heads) with patches of 4 pixels, for small images."""
    return _vit(num_classes, image_size, 192, 12)


def small_vit(num_classes: int = 10, image_size: int = 32) -> nn.Module:
    """Half as wide, with four blocks."""
    return _vit(num_classes, image_size, 96, 4)


def _vit(num_classes: int, image_size: int, width: int, depth: int) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=image_size, patch_size=4, embed_dim=width, depth=depth, num_heads=3, num_classes=num_classes
    )
