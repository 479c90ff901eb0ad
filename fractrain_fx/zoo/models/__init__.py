"""The paper's models that timm does not have, in plain PyTorch."""

from fractrain_fx.zoo.models.mobilenet import MobileNetV2, mobilenetv2
from fractrain_fx.zoo.models.resnet import ResNet, resnet38, resnet74, resnet110, resnet164
from fractrain_fx.zoo.models.transformer import TransformerLM, transformer_base

__all__ = [
    "MobileNetV2",
    "ResNet",
    "TransformerLM",
    "mobilenetv2",
    "resnet38",
    "resnet74",
    "resnet110",
    "resnet164",
    "transformer_base",
]
