"""MobileNetV2 for 32x32 images, as the paper trains it on CIFAR-10/100.

It differs from Sandler et al. (2018) in three points. The stem and the second stage keep the resolution. Every block
expands, also at ratio 1. A block that keeps the resolution but changes the width has a 1x1 convolution and a norm as
its skip path. This gives a forward pass of 91.15 million MACs, from which the paper's costs follow.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["InvertedResidual", "MobileNetV2", "mobilenetv2"]

STEM_WIDTH = 32
HEAD_WIDTH = 1280
# expansion ratio, output channels, blocks, stride of the first block
STAGES = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


class InvertedResidual(nn.Module):
    """1x1 expansion, 3x3 depthwise, linear 1x1 projection; a skip path if the resolution stays."""

    def __init__(self, inputs: int, outputs: int, ratio: int, stride: int) -> None:
        super().__init__()
        width = inputs * ratio
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, groups=width, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.residual = stride == 1
        self.shortcut: nn.Sequential | None = None
        if self.residual and inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Float[Tensor, "batch channels height width"]) -> Tensor:
        branch: Tensor = F.relu(self.bn1(self.conv1(x)))
        branch = F.relu(self.bn2(self.conv2(branch)))
        branch = self.bn3(self.conv3(branch))
        if not self.residual:
            return branch
        branch = branch + (x if self.shortcut is None else self.shortcut(x))
        return branch


class MobileNetV2(nn.Module):
    """A stem, seven stages of inverted residuals, a 1x1 head and a classifier.

    Args:
        num_classes: width of the classifier.
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, STEM_WIDTH, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(STEM_WIDTH)
        blocks, channels = [], STEM_WIDTH
        for ratio, outputs, count, first_stride in STAGES:
            for index in range(count):
                blocks.append(InvertedResidual(channels, outputs, ratio, first_stride if index == 0 else 1))
                channels = outputs
        self.blocks = nn.Sequential(*blocks)
        self.conv2 = nn.Conv2d(channels, HEAD_WIDTH, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(HEAD_WIDTH)
        self.fc = nn.Linear(HEAD_WIDTH, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch classes"]:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(self.blocks(x))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def mobilenetv2(num_classes: int = 10) -> MobileNetV2:
    """91.15 million MACs an image of 32x32."""
    return MobileNetV2(num_classes)
