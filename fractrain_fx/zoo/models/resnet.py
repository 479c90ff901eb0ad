"""ResNets for 32x32 images (He et al., 2016, section 4.2), as the paper trains them on CIFAR-10/100."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["BasicBlock", "Bottleneck", "ResNet", "resnet20", "resnet38", "resnet74", "resnet110", "resnet164"]

STAGE_WIDTHS = (16, 32, 64)

_conv1x1 = partial(nn.Conv2d, kernel_size=1, bias=False)
_conv3x3 = partial(nn.Conv2d, kernel_size=3, padding=1, bias=False)


class _Residual(nn.Module, ABC):
    """``relu(branch(x) + skip(x))``; the skip is a 1x1 convolution and a norm if the shape changes."""

    expansion: int
    downsample: nn.Sequential | None

    def _add_skip(self, inputs: int, outputs: int, stride: int) -> None:
        if stride == 1 and inputs == outputs:
            self.downsample = None
        else:
            self.downsample = nn.Sequential(_conv1x1(inputs, outputs, stride=stride), nn.BatchNorm2d(outputs))

    @abstractmethod
    def _branch(self, x: Tensor) -> Tensor: ...

    def forward(self, x: Float[Tensor, "batch channels height width"]) -> Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        return F.relu(self._branch(x) + skip)


class BasicBlock(_Residual):
    """Two 3x3 convolutions of ``width`` channels; the first one strides."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = _conv3x3(inputs, width, stride=stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3x3(width, width)
        self.bn2 = nn.BatchNorm2d(width)
        self._add_skip(inputs, width, stride)

    def _branch(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        return x


class Bottleneck(_Residual):
    """1x1, 3x3, 1x1 convolutions, the last to ``4 * width`` channels; the 3x3 strides."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = _conv1x1(inputs, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3x3(width, width, stride=stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv1x1(width, outputs)
        self.bn3 = nn.BatchNorm2d(outputs)
        self._add_skip(inputs, outputs, stride)

    def _branch(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        return x


class ResNet(nn.Module):
    """Three stages of ``depth`` blocks at 16, 32 and 64 channels on 32x32, 16x16 and 8x8 positions.

    Args:
        block: ``BasicBlock`` (6 * depth + 2 layers) or ``Bottleneck`` (9 * depth + 2 layers).
        depth: blocks a stage.
        num_classes: width of the classifier.
    """

    def __init__(self, block: type[BasicBlock] | type[Bottleneck], depth: int, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = _conv3x3(3, STAGE_WIDTHS[0])
        self.bn1 = nn.BatchNorm2d(STAGE_WIDTHS[0])
        stages, channels = [], STAGE_WIDTHS[0]
        for width in STAGE_WIDTHS:
            blocks = []
            for index in range(depth):
                stride = 2 if index == 0 and width != STAGE_WIDTHS[0] else 1
                blocks.append(block(channels, width, stride))
                channels = width * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3 = stages
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch classes"]:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def resnet20(num_classes: int = 10) -> ResNet:
    """Three basic blocks a stage; not in the paper, for experiments on a small machine."""
    return ResNet(BasicBlock, 3, num_classes)


def resnet38(num_classes: int = 10) -> ResNet:
    """Six basic blocks a stage: 83.28 million MACs an image of 32x32."""
    return ResNet(BasicBlock, 6, num_classes)


def resnet74(num_classes: int = 10) -> ResNet:
    """Twelve basic blocks a stage: 168.22 million MACs an image of 32x32."""
    return ResNet(BasicBlock, 12, num_classes)


def resnet110(num_classes: int = 10) -> ResNet:
    """Eighteen basic blocks a stage: 253.15 million MACs an image of 32x32."""
    return ResNet(BasicBlock, 18, num_classes)


def resnet164(num_classes: int = 10) -> ResNet:
    """Eighteen bottleneck blocks a stage: 247.65 million MACs an image of 32x32."""
    return ResNet(Bottleneck, 18, num_classes)
