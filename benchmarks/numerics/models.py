"""Models that are measured and are not in a library by name."""

from __future__ import annotations

from torch import nn

__all__ = ["tiny_vit"]


def tiny_vit(num_classes: int = 10, image_size: int = 32) -> nn.Module:
    """Timm's vision transformer, as wide as ViT-Tiny's half and four blocks deep, for images of 32 pixels."""
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=image_size, patch_size=4, embed_dim=96, depth=4, num_heads=3, num_classes=num_classes
    )
