"""Build classifiers of images and U-Net from convolutions, in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.inputs import Built


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
    channels: int,
    blocks: tuple[int, ...],
    *,
    basic: bool = False,
    groups: int = 1,
    group_width: int = 64,
    squeezed: bool = False,
    first_stride: int = 1,
    narrowest: int = 64,
) -> tuple[list[nn.Module], int]:
    """The residual blocks of a ResNet, ResNeXt or SE-ResNeXt, and the channels that they end in."""
    layers: list[nn.Module] = []
    for stage, count in enumerate(blocks):
        out = narrowest * 2**stage * (1 if basic else 4)
        width = int(narrowest * 2**stage * group_width / 64) * groups
        for block in range(count):
            stride = (1 if stage == 0 else 2) if block == 0 else 1
            stride = first_stride if stage == 0 and block == 0 else stride
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
    blocks: tuple[int, ...], *, classes: int, narrowest: int = 64, **kind: Any
) -> list[nn.Module]:
    """A ResNet from images to scores; `kind` are options of `residual_stages`."""
    layers, channels = residual_stages(narrowest, blocks, narrowest=narrowest, **kind)
    stem = [*convolution(3, narrowest, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return [*stem, *layers, *head]


class Classifier(nn.Sequential):
    """Layers from images to scores."""


def _labelled(batch: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,))


class _Images(nn.Module):
    """Called with images and labels, of which only the loss takes the labels."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        scores: Tensor = self.layers(images)
        return scores


def cross_entropy(scores: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of the scores against the labels of the batch."""
    return F.cross_entropy(scores, batch[1])


def resnet(
    batch: int, *, blocks: tuple[int, ...], size: int = 224, classes: int = 1000, **kind: Any
) -> Built:
    """ResNet for ImageNet; `kind` are options of `residual_stages`."""
    with torch.device("meta"):
        model = _Images(Classifier(*residual_layers(blocks, classes=classes, **kind)))
    return model.train(), _labelled(batch, size, classes), cross_entropy


def cifar_resnet18(batch: int) -> Built:
    """ResNet-18 for 32x32 images: a 3x3 stem and no pooling before the blocks."""
    with torch.device("meta"):
        layers, channels = residual_stages(64, (2, 2, 2, 2), basic=True)
        stem = [*convolution(3, 64, 3), nn.ReLU(inplace=True)]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
        model = _Images(Classifier(*stem, *layers, *head))
    return model.train(), _labelled(batch, 32, 10), cross_entropy


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
        squeezed: int | None,
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


# (expansion, channels, blocks, stride, kernel) of EfficientNet-B0 (Tan and Le, 2019, table 1).
_EFFICIENTNET = (
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

    with torch.device("meta"):
        channels = scaled(32)
        layers: list[nn.Module] = [*convolution(3, channels, 3, 2), nn.SiLU(inplace=True)]
        for expansion, out, blocks, stride, kernel in _EFFICIENTNET:
            for block in range(-int(-depth * blocks // 1)):
                layers.append(
                    InvertedResidual(
                        channels,
                        scaled(out),
                        size=kernel,
                        stride=stride if block == 0 else 1,
                        expansion=expansion,
                        squeezed=channels * (expansion if wide_se else 1) // 4,
                        activation=nn.SiLU,
                    )
                )
                channels = scaled(out)
        layers += [*convolution(channels, scaled(1280), 1), nn.SiLU(inplace=True)]
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2)]
        model = _Images(Classifier(*layers, nn.Linear(scaled(1280), 1000)))
    return model.train(), _labelled(batch, size, 1000), cross_entropy


class Labelled(nn.Module):
    """A classifier called with images and labels, that returns its cross-entropy."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(images), labels)


def small_resnet() -> nn.Module:
    """ResNet with bottleneck blocks (2, 2, 2, 2), a ResNet-26, at half width and 100 classes."""
    layers = residual_layers((2, 2, 2, 2), classes=100, narrowest=32)
    return Labelled(nn.Sequential(*layers)).train()


# (expansion, blocks, stride) of MobileNetV2's stages (Sandler et al., 2018, table 2).
_MOBILENET = ((1, 1, 1), (6, 2, 2), (6, 3, 2), (6, 4, 2), (6, 3, 1), (6, 3, 2), (6, 1, 1))


def mobilenet_layers(
    stem: int, widths: tuple[int, ...], last: int, *, classes: int
) -> list[nn.Module]:
    """MobileNetV2 from images to scores, `widths` the channels of its stages."""
    layers: list[nn.Module] = [*convolution(3, stem, 3, 2), nn.ReLU6(inplace=True)]
    channels = stem
    for (expansion, blocks, stride), width in zip(_MOBILENET, widths, strict=True):
        for block in range(blocks):
            layers.append(
                InvertedResidual(
                    channels,
                    width,
                    size=3,
                    stride=stride if block == 0 else 1,
                    expansion=expansion,
                    squeezed=None,
                    activation=nn.ReLU6,
                )
            )
            channels = width
    layers += [*convolution(channels, last, 1), nn.ReLU6(inplace=True), nn.AdaptiveAvgPool2d(1)]
    return [*layers, nn.Flatten(), nn.Dropout(0.2), nn.Linear(last, classes)]


def mobilenet() -> nn.Module:
    """MobileNetV2 at half width on 128-pixel images: depthwise convolutions, memory-bound."""
    layers = mobilenet_layers(16, (8, 16, 16, 32, 48, 80, 160), 640, classes=100)
    return Labelled(nn.Sequential(*layers)).train()


def vgg_layers(repeats: tuple[int, ...]) -> list[nn.Module]:
    """VGG without batch norm (Simonyan and Zisserman 2015): convolutions of each width, head."""
    layers: list[nn.Module] = []
    channels = 3
    for width, count in zip((64, 128, 256, 512, 512), repeats, strict=True):
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers.append(nn.Flatten())
    for inputs in (512 * 7 * 7, 4096):
        layers += [nn.Linear(inputs, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    return [*layers, nn.Linear(4096, 1000)]


def vgg16() -> nn.Module:
    """VGG-16, configuration D."""
    return Labelled(nn.Sequential(*vgg_layers((2, 2, 3, 3, 3)))).train()


def _double_convolution(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        *convolution(channels_in, channels_out, 3),
        nn.ReLU(inplace=True),
        *convolution(channels_out, channels_out, 3),
        nn.ReLU(inplace=True),
    )


class Unet(nn.Module):
    """U-Net: contracting and expanding paths joined by concatenated skips."""

    def __init__(self, *, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            _double_convolution(channels_in, channels_out)
            for channels_in, channels_out in zip((3, *widths), widths, strict=False)
        )
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.lift = nn.ModuleList(nn.ConvTranspose2d(deep, flat, 2, 2) for deep, flat in pairs)
        self.up = nn.ModuleList(_double_convolution(2 * flat, flat) for _, flat in pairs)
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        skips = []
        for level, block in enumerate(self.down):
            images = block(images if level == 0 else F.max_pool2d(images, 2))
            skips.append(images)
        skips.pop()
        for lift, block in zip(self.lift, self.up, strict=True):
            images = block(torch.cat([skips.pop(), lift(images)], dim=1))
        logits: Tensor = self.head(images)
        return logits
