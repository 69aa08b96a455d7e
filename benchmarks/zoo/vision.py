"""Build the seven image classifiers of Stash (Sharma et al., ICDCS 2023) in plain torch.

Layers and widths are those of the models' papers in the form that torchvision publishes, whose
parameter counts `tests/benchmarks/test_stall_headlines.py` knows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.convolutional import (
    Classifier,
    convolution,
    mobilenet_layers,
    residual_layers,
    vgg_layers,
)
from zoo.inputs import Built, labelled_images


class _Images(nn.Module):
    """Called with images and labels: the cross entropy of the layers' scores."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(images), labels)


def alexnet() -> nn.Module:
    """AlexNet on one tower (Krizhevsky 2014)."""
    layers: list[nn.Module] = []
    channels = 3
    for width, size, stride, padding, pooled in (
        (64, 11, 4, 2, True),
        (192, 5, 1, 2, True),
        (384, 3, 1, 1, False),
        (256, 3, 1, 1, False),
        (256, 3, 1, 1, True),
    ):
        layers += [nn.Conv2d(channels, width, size, stride, padding), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(3, 2)] if pooled else []
        channels = width
    head: list[nn.Module] = [nn.Flatten()]
    for inputs in (256 * 6 * 6, 4096):
        head += [nn.Dropout(), nn.Linear(inputs, 4096), nn.ReLU(inplace=True)]
    return Classifier(*layers, *head, nn.Linear(4096, 1000))


def vgg11() -> nn.Module:
    """VGG-11, configuration A."""
    return Classifier(*vgg_layers((1, 1, 2, 2, 2)))


def resnet18() -> nn.Module:
    """ResNet-18 (He et al., 2015)."""
    return Classifier(*residual_layers((2, 2, 2, 2), classes=1000, basic=True))


def resnet50() -> nn.Module:
    """ResNet-50, its strides in the 3 × 3 convolutions."""
    return Classifier(*residual_layers((3, 4, 6, 3), classes=1000))


class Fire(nn.Module):
    """Squeeze the channels, then expand them by filters of two sizes (Iandola et al., 2016)."""

    def __init__(self, channels: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, squeezed, 1)
        self.small = nn.Conv2d(squeezed, expanded, 1)
        self.large = nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        squeezed = F.relu(self.squeeze(images), inplace=True)
        both = (F.relu(each(squeezed), inplace=True) for each in (self.small, self.large))
        return torch.cat(list(both), dim=1)


def squeezenet() -> nn.Module:
    """SqueezeNet 1.0."""
    layers: list[nn.Module] = [nn.Conv2d(3, 96, 7, 2), nn.ReLU(inplace=True)]
    channels = 96
    widths = ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256))
    for number, (squeezed, expanded) in enumerate(widths):
        if number in (0, 3, 7):
            layers.append(nn.MaxPool2d(3, 2, ceil_mode=True))
        layers.append(Fire(channels, squeezed, expanded))
        channels = 2 * expanded
    layers += [nn.Dropout(), nn.Conv2d(channels, 1000, 1), nn.ReLU(inplace=True)]
    return Classifier(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Shuffled(nn.Module):
    """Half of the channels through a branch, then both halves mixed (Ma et al., 2018)."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        width, self.stride = channels_out // 2, stride
        inputs = channels_in if stride > 1 else width
        self.branch = nn.Sequential(
            *convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride, groups=width),
            *convolution(width, width, 1),
            nn.ReLU(inplace=True),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Sequential(
                *convolution(inputs, inputs, 3, stride, groups=inputs),
                *convolution(inputs, width, 1),
                nn.ReLU(inplace=True),
            )

    def forward(self, images: Tensor) -> Tensor:
        left, right = images.chunk(2, dim=1) if self.stride == 1 else (images, images)
        joined = torch.cat([self.shortcut(left), self.branch(right)], dim=1)
        batch, channels, height, width = joined.shape
        halves = joined.view(batch, 2, channels // 2, height, width).transpose(1, 2)
        return halves.reshape(batch, channels, height, width)


def shufflenet() -> nn.Module:
    """ShuffleNet V2 at half width."""
    layers: list[nn.Module] = [*convolution(3, 24, 3, 2), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = 24
    for width, repeats in ((48, 4), (96, 8), (192, 4)):
        for block in range(repeats):
            layers.append(Shuffled(channels, width, 2 if block == 0 else 1))
            channels = width
    layers += [*convolution(channels, 1024, 1), nn.ReLU(inplace=True)]
    return Classifier(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 1000))


def mobilenet_v2() -> nn.Module:
    """MobileNetV2 at full width (Sandler et al., 2018)."""
    layers = mobilenet_layers(32, (16, 24, 32, 64, 96, 160, 320), 1280, classes=1000)
    return Classifier(*layers)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "alexnet": alexnet,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "shufflenet-v2-0.5": shufflenet,
    "mobilenet-v2": mobilenet_v2,
    "squeezenet": squeezenet,
    "vgg11": vgg11,
}


def classifier(name: str, batch: int) -> Built:
    """One of `MODELS` with its loss on 224-pixel images, no weights allocated."""
    with torch.device("meta"):
        return _Images(MODELS[name]()).train(), labelled_images(224, 1000, "images")(batch), None
