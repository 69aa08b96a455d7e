"""Build the detectors and segmenters of published tables in plain torch, without weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo import convolutional
from zoo.convolutional import convolution, residual_stages
from zoo.inputs import Built, on_meta, own_loss


def _stages(blocks: tuple[int, ...], **kind: Any) -> nn.ModuleList:
    """A ResNet's stem and stages, one module each."""
    layers, _ = residual_stages(blocks, **kind)
    stem = nn.Sequential(*convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    stages: list[nn.Module] = [stem]
    for count in blocks:
        stages.append(nn.Sequential(*layers[:count]))
        layers = layers[count:]
    return nn.ModuleList(stages)


class RetinaNet(nn.Module):
    """A feature pyramid over a ResNeXt-50, and two heads over all its levels (Lin et al., 2017)."""

    ANCHORS = 9

    def __init__(self, *, classes: int, width: int = 256) -> None:
        super().__init__()
        self.stages = _stages((3, 4, 6, 3), groups=32, group_width=4)
        self.lateral = nn.ModuleList(nn.Conv2d(each, width, 1) for each in (512, 1024, 2048))
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.coarser = nn.ModuleList(nn.Conv2d(width, width, 3, 2, 1) for _ in range(2))
        self.scores = self._head(width, classes)
        self.boxes = self._head(width, 4)
        self.classes = classes

    def _head(self, width: int, outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers, nn.Conv2d(width, outputs * self.ANCHORS, 3, padding=1))

    def forward(self, images: Tensor) -> Tensor:
        levels, states = [], images
        for stage in self.stages:
            states = stage(states)
            levels.append(states)
        pyramid: list[Tensor] = []
        coarse: Tensor | None = None
        for lateral, smooth, level in zip(
            reversed(self.lateral), reversed(self.smooth), reversed(levels[2:]), strict=True
        ):
            joined = lateral(level)
            if coarse is not None:
                joined = joined + F.interpolate(coarse, size=joined.shape[-2:])
            coarse = joined
            pyramid.insert(0, smooth(joined))
        for coarser in self.coarser:
            pyramid.append(coarser(pyramid[-1]))
        return self._loss(pyramid)

    def _loss(self, pyramid: list[Tensor]) -> Tensor:
        """Focal loss of anchors that hold nothing, as nearly all do, and distances of the boxes."""
        images = pyramid[0].shape[0]
        scores = [self.scores(level).flatten(2).transpose(1, 2) for level in pyramid]
        boxes = [self.boxes(level).flatten(2).transpose(1, 2) for level in pyramid]
        logits = torch.cat([each.reshape(images, -1, self.classes) for each in scores], 1).float()
        chances = torch.sigmoid(logits)
        loss = (F.softplus(logits) * chances * chances).sum()
        distances = torch.cat([each.reshape(images, -1, 4) for each in boxes], 1).float()
        return loss + distances.abs().sum()


def retinanet(batch: int, *, size: int, classes: int) -> Built:
    """RetinaNet as MLPerf trains it on Open Images.

    Its norms and the first two parts of its backbone are frozen (trainable-backbone-layers 3).
    """
    model = on_meta(RetinaNet, classes=classes)
    model.stages[:2].requires_grad_(False)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval().requires_grad_(False)
    return model, torch.randn(batch, 3, size, size), own_loss


class Ssd(nn.Module):
    """SSD300 over a ResNet-50 cut after its third stage (NVIDIA's variant of Liu et al., 2016)."""

    def __init__(self, *, classes: int) -> None:
        super().__init__()
        stages = _stages((3, 4, 6, 3))
        self.backbone = nn.Sequential(*stages[:4])
        for layer in self.backbone[3].modules():
            if isinstance(layer, nn.Conv2d):
                layer.stride = (1, 1)
        widths = (1024, 512, 512, 256, 256, 256)
        middles, strides, paddings = (256, 256, 128, 128, 128), (2, 2, 2, 1, 1), (1, 1, 1, 0, 0)
        self.extra = nn.ModuleList(
            nn.Sequential(
                *convolution(before, middle, 1),
                nn.ReLU(inplace=True),
                nn.Conv2d(middle, after, 3, stride, padding, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(inplace=True),
            )
            for before, middle, after, stride, padding in zip(
                widths, middles, widths[1:], strides, paddings, strict=False
            )
        )
        levels = [*zip(widths, (4, 6, 6, 6, 4, 4), strict=True)]
        self.places, self.scores = (
            nn.ModuleList(nn.Conv2d(width, each * boxes, 3, padding=1) for width, boxes in levels)
            for each in (4, classes)
        )
        self.classes = classes

    def forward(self, images: Tensor) -> Tensor:
        levels = [self.backbone(images)]
        for layer in self.extra:
            levels.append(layer(levels[-1]))
        places = self._joined(self.places, levels, 4)
        scores = self._joined(self.scores, levels, self.classes).float()
        labels = torch.zeros(len(images), scores.shape[2], dtype=torch.long)
        entropy = F.cross_entropy(scores, labels, reduction="none")
        # The hardest negatives are found by sorting twice.
        order = entropy.sort(dim=1, descending=True)[1].sort(dim=1)[1]
        hard = (order < 3 * scores.shape[2] // 100).float()
        return (entropy * hard).sum() + F.smooth_l1_loss(
            places.float(), torch.zeros_like(places, dtype=torch.float32)
        )

    @staticmethod
    def _joined(heads: nn.ModuleList, levels: list[Tensor], outputs: int) -> Tensor:
        """What a head says of the boxes of each level, all of them together."""
        pairs = zip(heads, levels, strict=True)
        return torch.cat([head(each).reshape(len(each), outputs, -1) for head, each in pairs], 2)


def ssd(batch: int, *, classes: int) -> Built:
    """SSD300 on COCO."""
    return on_meta(Ssd, classes=classes), torch.randn(batch, 3, 300, 300), own_loss


class Unet(convolutional.Unet):
    """nnU-Net in 2 or 3 dimensions: strided convolutions down, norms of each instance."""

    def two(self, before: int, after: int, stride: int = 1) -> nn.Sequential:
        layer, norm = (
            getattr(nn, f"{name}{self.dimensions}d") for name in ("Conv", "InstanceNorm")
        )
        return nn.Sequential(
            layer(before, after, 3, stride, 1, bias=False),
            norm(after, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
            layer(after, after, 3, 1, 1, bias=False),
            norm(after, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
        )

    def halved(self, images: Tensor) -> Tensor:
        return images

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        scores = super().forward(images).float()
        chances = F.softmax(scores, 1)
        overlap = chances * F.one_hot(labels, scores.shape[1]).movedim(-1, 1)
        return F.cross_entropy(scores, labels) - overlap.sum() / chances.sum()


def unet(batch: int, *, patch: tuple[int, ...], most_channels: int) -> Built:
    """nnU-Net on brain tumours: 4 modalities, 4 classes, 6 levels from 32 channels."""
    widths = tuple(min(32 * 2**level, most_channels) for level in range(6))
    model = on_meta(Unet, dimensions=len(patch), widths=widths, channels=4, classes=4)
    labels = torch.randint(0, 4, (batch, *patch))
    return model, (torch.randn(batch, 4, *patch), labels), own_loss
