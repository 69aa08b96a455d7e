"""Build five image classifiers of Stash (Sharma et al., ICDCS 2023) in plain torch.

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


def mobilenet_v2() -> nn.Module:
    """MobileNetV2 at full width (Sandler et al., 2018)."""
    layers = mobilenet_layers(32, (16, 24, 32, 64, 96, 160, 320), 1280, classes=1000)
    return Classifier(*layers)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "alexnet": alexnet,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "mobilenet-v2": mobilenet_v2,
    "vgg11": vgg11,
}


def classifier(name: str, batch: int) -> Built:
    """One of `MODELS` with its loss on 224-pixel images, no weights allocated."""
    with torch.device("meta"):
        return _Images(MODELS[name]()).train(), labelled_images(224, 1000, "images")(batch), None
