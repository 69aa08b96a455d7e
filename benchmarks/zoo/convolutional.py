"""Build classifiers of images and U-Net from convolutions, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.inputs import Built, images, on_meta


def convolution(
    channels_in: int, channels_out: int, size: int, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    """A convolution without bias, and its batch norm."""
    return [
        nn.Conv2d(channels_in, channels_out, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(channels_out),
    ]


class SqueezeExcitation(nn.Module):
    """Weigh channels by two layers over their means (Hu et al., 2018)."""

    def __init__(self, channels: int, squeezed: int, activation: nn.Module) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, squeezed, 1)
        self.expand = nn.Conv2d(squeezed, channels, 1)
        self.activation = activation

    def forward(self, images: Tensor) -> Tensor:
        means = images.mean((2, 3), keepdim=True)
        return images * torch.sigmoid(self.expand(self.activation(self.squeeze(means))))


class Residual(nn.Module):
    """A branch beside a shortcut, which is projected where shapes differ (He et al., 2015)."""

    def __init__(
        self, branch: list[nn.Module], channels_in: int, channels_out: int, stride: int
    ) -> None:
        super().__init__()
        self.branch = nn.Sequential(*branch)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(*convolution(channels_in, channels_out, 1, stride))

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.branch(images) + self.shortcut(images), inplace=True)


def residual_stages(
    blocks: tuple[int, ...],
    *,
    basic: bool = False,
    groups: int = 1,
    group_width: int = 64,
    squeezed: bool = False,
    narrowest: int = 64,
) -> tuple[list[nn.Module], int]:
    """The residual blocks of a ResNet, ResNeXt or SE-ResNeXt, and the channels that they end in."""
    layers: list[nn.Module] = []
    channels = narrowest
    for stage, count in enumerate(blocks):
        out = narrowest * 2**stage * (1 if basic else 4)
        width = int(narrowest * 2**stage * group_width / 64) * groups
        for block in range(count):
            stride = 2 if stage and not block else 1
            if basic:
                branch = [*convolution(channels, out, 3, stride), nn.ReLU(inplace=True)]
                branch += convolution(out, out, 3)
            else:
                branch = [*convolution(channels, width, 1), nn.ReLU(inplace=True)]
                branch += convolution(width, width, 3, stride, groups)
                branch += [nn.ReLU(inplace=True), *convolution(width, out, 1)]
            if squeezed:
                branch.append(SqueezeExcitation(out, out // 16, nn.ReLU(inplace=True)))
            layers.append(Residual(branch, channels, out, stride))
            channels = out
    return layers, channels


def residual_layers(
    blocks: tuple[int, ...], *, classes: int, narrowest: int = 64, tiny: bool = False, **kind: Any
) -> list[nn.Module]:
    """A ResNet from images to scores; `kind` are options of `residual_stages`.

    Of `tiny` images, 32 pixels wide, the stem is 3x3 and pools nothing.
    """
    layers, channels = residual_stages(blocks, narrowest=narrowest, **kind)
    stem = convolution(3, narrowest, 3) if tiny else convolution(3, narrowest, 7, 2)
    stem += [nn.ReLU(inplace=True), *([] if tiny else [nn.MaxPool2d(3, 2, 1)])]
    return [*stem, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


class Classifier(nn.Module):
    """Layers from images to scores, called with labels too, which only the loss takes."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.layers(images)  # type: ignore[no-any-return]


def cross_entropy(scores: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of scores against the labels of the batch, one for each image or word."""
    return F.cross_entropy(scores.flatten(0, -2), batch[1].flatten())


def classifier(layers: Callable[[], list[nn.Module]], batch: int, size: int, classes: int) -> Built:
    """A model of what `layers` gives, without memory for weights, and square images."""
    model = on_meta(lambda: Classifier(layers()))
    return model, (images(batch, size), torch.randint(0, classes, (batch,))), cross_entropy


def resnet(
    batch: int, *, blocks: tuple[int, ...], size: int = 224, classes: int = 1000, **kind: Any
) -> Built:
    """ResNet for ImageNet; `kind` are options of `residual_stages`."""
    return classifier(
        partial(residual_layers, blocks, classes=classes, **kind), batch, size, classes
    )


def cifar_resnet18(batch: int) -> Built:
    """ResNet-18 for 32x32 images."""
    layers = partial(residual_layers, (2, 2, 2, 2), classes=10, basic=True, tiny=True)
    return classifier(layers, batch, 32, 10)


class InvertedResidual(nn.Module):
    """MobileNetV2's and EfficientNet's block: widen, depthwise, squeeze, narrow.

    Without `squeezed` channels nothing is squeezed; no activation follows the last convolution.
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        *,
        size: int,
        stride: int,
        expansion: int,
        squeezed: int,
        activation: type[nn.Module],
    ) -> None:
        super().__init__()
        hidden = channels_in * expansion
        widen = [*convolution(channels_in, hidden, 1), activation(inplace=True)]
        squeeze = (
            [SqueezeExcitation(hidden, squeezed, activation(inplace=True))] if squeezed else []
        )
        self.residual = stride == 1 and channels_in == channels_out
        self.branch = nn.Sequential(
            *(widen if expansion > 1 else []),
            *convolution(hidden, hidden, size, stride, hidden),
            activation(inplace=True),
            *squeeze,
            *convolution(hidden, channels_out, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        narrow: Tensor = self.branch(images)
        return images + narrow if self.residual else narrow


# (expansion, channels, blocks, stride, kernel) of a stage.
Stage = tuple[int, int, int, int, int]


def _inverted_layers(
    stem: int,
    stages: Sequence[Stage],
    last: int,
    *,
    activation: type[nn.Module],
    squeezed: Callable[[int, int], int] = lambda channels, expansion: 0,
    classes: int,
) -> list[nn.Module]:
    """Stages of inverted residuals from images to scores, between the channels `stem` and `last`.

    A block of so many channels and such an expansion has so many `squeezed`.
    """
    layers: list[nn.Module] = [*convolution(3, stem, 3, 2), activation(inplace=True)]
    channels = stem
    for expansion, out, blocks, stride, size in stages:
        for block in range(blocks):
            layers.append(
                InvertedResidual(
                    channels,
                    out,
                    size=size,
                    stride=1 if block else stride,
                    expansion=expansion,
                    squeezed=squeezed(channels, expansion),
                    activation=activation,
                )
            )
            channels = out
    layers += [*convolution(channels, last, 1), activation(inplace=True), nn.AdaptiveAvgPool2d(1)]
    return [*layers, nn.Flatten(), nn.Dropout(0.2), nn.Linear(last, classes)]


# EfficientNet-B0 (Tan and Le, 2019, table 1).
_EFFICIENTNET: tuple[Stage, ...] = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)


def efficientnet(
    batch: int, *, width: float = 1.0, depth: float = 1.0, size: int = 224, wide_se: bool = False
) -> Built:
    """EfficientNet; `wide_se` squeezes from the widened channels (NVIDIA's widese)."""

    def scaled(channels: int) -> int:
        rounded = max(8, int(channels * width + 4) // 8 * 8)
        return rounded if rounded >= 0.9 * channels * width else rounded + 8

    layers = partial(
        _inverted_layers,
        scaled(32),
        [(e, scaled(out), math.ceil(depth * n), *rest) for e, out, n, *rest in _EFFICIENTNET],
        scaled(1280),
        activation=nn.SiLU,
        classes=1000,
        squeezed=lambda channels, expansion: channels * (expansion if wide_se else 1) // 4,
    )
    return classifier(layers, batch, size, 1000)


class Labelled(nn.Module):
    """A classifier called with images and labels, that returns its cross-entropy."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(images), labels)


def small_resnet() -> nn.Module:
    """ResNet with bottleneck blocks (2, 2, 2, 2), a ResNet-26, at half width and 100 classes."""
    return Labelled(nn.Sequential(*residual_layers((2, 2, 2, 2), classes=100, narrowest=32)))


# (expansion, blocks, stride) of MobileNetV2's stages (Sandler et al., 2018, table 2).
_MOBILENET = ((1, 1, 1), (6, 2, 2), (6, 3, 2), (6, 4, 2), (6, 3, 1), (6, 3, 2), (6, 1, 1))


def mobilenet() -> nn.Module:
    """MobileNetV2 at half width on 128-pixel images: depthwise convolutions, memory-bound."""
    widths = (8, 16, 16, 32, 48, 80, 160)
    stages = [(e, out, *rest, 3) for (e, *rest), out in zip(_MOBILENET, widths, strict=True)]
    layers = _inverted_layers(16, stages, 640, activation=nn.ReLU6, classes=100)
    return Labelled(nn.Sequential(*layers))


def vgg16_layers() -> list[nn.Module]:
    """VGG-16 without batch norm (Simonyan and Zisserman 2015, table 1, column D)."""
    layers: list[nn.Module] = []
    channels = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers.append(nn.Flatten())
    for inputs in (512 * 7 * 7, 4096):
        layers += [nn.Linear(inputs, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    return [*layers, nn.Linear(4096, 1000)]


def vgg16() -> nn.Module:
    """VGG-16 for ImageNet."""
    return Labelled(nn.Sequential(*vgg16_layers()))


class Unet(nn.Module):
    """U-Net: contracting and expanding paths joined by concatenated skips."""

    def __init__(
        self, *, widths: tuple[int, ...], classes: int, channels: int = 3, dimensions: int = 2
    ) -> None:
        super().__init__()
        self.dimensions = dimensions
        self.down = nn.ModuleList(
            self.two(before, after, stride=2 if level else 1)
            for level, (before, after) in enumerate(zip((channels, *widths), widths, strict=False))
        )
        deep, shallow = widths[:0:-1], widths[-2::-1]
        lift, layer = (getattr(nn, f"{name}{dimensions}d") for name in ("ConvTranspose", "Conv"))
        self.lift = nn.ModuleList(
            lift(before, after, 2, 2) for before, after in zip(deep, shallow, strict=True)
        )
        self.up = nn.ModuleList(self.two(2 * after, after) for after in shallow)
        self.head = layer(widths[0], classes, 1)

    def two(self, before: int, after: int, stride: int = 1) -> nn.Sequential:
        """The convolutions of a level, to which images come halved where their stride is 2."""
        return nn.Sequential(
            *convolution(before, after, 3),
            nn.ReLU(inplace=True),
            *convolution(after, after, 3),
            nn.ReLU(inplace=True),
        )

    def halved(self, images: Tensor) -> Tensor:
        """Images on their way down a level."""
        return F.max_pool2d(images, 2)

    def forward(self, images: Tensor) -> Tensor:
        skips = []
        for level, block in enumerate(self.down):
            images = block(self.halved(images) if level else images)
            skips.append(images)
        skips.pop()
        for lift, block in zip(self.lift, self.up, strict=True):
            images = block(torch.cat([skips.pop(), lift(images)], 1))
        return self.head(images)  # type: ignore[no-any-return]
