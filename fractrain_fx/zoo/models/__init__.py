"""Models for 32x32 images, and a language model, in plain PyTorch."""

from fractrain_fx.zoo.models.mobilenet import MobileNetV2, mobilenetv2
from fractrain_fx.zoo.models.resnet import ResNet, resnet20, resnet38, resnet74, resnet110, resnet164
from fractrain_fx.zoo.models.transformer import TransformerLM, transformer_base

__all__ = [
    "MobileNetV2",
    "ResNet",
    "TransformerLM",
    "mobilenetv2",
    "resnet20",
    "resnet38",
    "resnet74",
    "resnet110",
    "resnet164",
    "transformer_base",
]
