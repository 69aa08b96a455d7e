"""Build the convolutional speech recognisers of published tables, without weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.inputs import Built
from zoo.sequence import aligned_loss

# Mel-frequency features of a frame.
_FEATURES = 64


def _convolution(
    channels_in: int, channels_out: int, size: int, *, stride: int = 1, dilation: int = 1,
    separable: bool = False,
) -> list[nn.Module]:  # fmt: skip
    padding = dilation * (size - 1) // 2
    if separable:
        return [
            nn.Conv1d(
                channels_in, channels_in, size, stride, padding, dilation, channels_in, bias=False
            ),
            nn.Conv1d(channels_in, channels_out, 1, bias=False),
            nn.BatchNorm1d(channels_out),
        ]
    return [
        nn.Conv1d(channels_in, channels_out, size, stride, padding, dilation, bias=False),
        nn.BatchNorm1d(channels_out),
    ]


class SpeechBlock(nn.Module):
    """Repeated convolutions beside shortcuts from the inputs given, each projected."""

    def __init__(
        self, shortcuts: list[int], channels: int, size: int, *, repeats: int, separable: bool,
        drop: float,
    ) -> None:  # fmt: skip
        super().__init__()
        layers: list[nn.Module] = []
        for repeat in range(repeats):
            inputs = shortcuts[-1] if repeat == 0 else channels
            layers += _convolution(inputs, channels, size, separable=separable)
            if repeat < repeats - 1:
                layers += [nn.ReLU(inplace=True), nn.Dropout(drop)]
        self.branch = nn.Sequential(*layers)
        self.shortcuts = nn.ModuleList(
            nn.Sequential(*_convolution(inputs, channels, 1)) for inputs in shortcuts
        )
        self.drop = drop

    def forward(self, earlier: list[Tensor]) -> Tensor:
        states = self.branch(earlier[-1])
        for shortcut, inputs in zip(self.shortcuts, earlier[-len(self.shortcuts) :], strict=True):
            states = states + shortcut(inputs)
        return F.dropout(F.relu(states, inplace=True), self.drop)


class SpeechRecogniser(nn.Module):
    """Jasper (`dense` shortcuts from all blocks) or QuartzNet (`separable` convolutions)."""

    def __init__(
        self, *, blocks: tuple[tuple[int, int], ...], ends: tuple[tuple[int, int], ...],
        repeats: int, dense: bool, separable: bool, drop: float,
    ) -> None:  # fmt: skip
        super().__init__()
        (first, size), (wide, wide_size), (last, _) = ends
        self.stem = nn.Sequential(
            *_convolution(_FEATURES, first, size, stride=2, separable=separable),
            nn.ReLU(inplace=True),
        )
        seen = [first]
        self.blocks = nn.ModuleList()
        for channels, kernel in blocks:
            shortcuts = list(seen) if dense else seen[-1:]
            self.blocks.append(
                SpeechBlock(
                    shortcuts, channels, kernel, repeats=repeats, separable=separable, drop=drop
                )
            )
            seen.append(channels)
        self.head = nn.Sequential(
            *_convolution(seen[-1], wide, wide_size, dilation=2, separable=separable),
            nn.ReLU(inplace=True),
            *_convolution(wide, last, 1),
            nn.ReLU(inplace=True),
            nn.Conv1d(last, 29, 1),
        )

    def forward(self, features: Tensor, texts: Tensor) -> Tensor:
        states = [self.stem(features)]
        for block in self.blocks:
            states.append(block(states))
        return self.head(states[-1]).permute(2, 0, 1)  # type: ignore[no-any-return]


def _speech(batch: int, frames: int, **sizes: Any) -> Built:
    with torch.device("meta"):
        model = SpeechRecogniser(repeats=5, drop=0.2, **sizes)
    texts = torch.randint(1, 29, (batch, 170))
    return model.train(), (torch.randn(batch, _FEATURES, frames), texts), aligned_loss


def jasper(batch: int, *, frames: int) -> Built:
    """Jasper 10x5 with dense residuals (Li et al., 2019, table 1)."""
    pairs = ((256, 11), (384, 13), (512, 17), (640, 21), (768, 25))
    return _speech(
        batch,
        frames,
        blocks=tuple(pair for pair in pairs for _ in range(2)),
        ends=((256, 11), (896, 29), (1024, 1)),
        dense=True,
        separable=False,
    )


def quartznet(batch: int, *, frames: int) -> Built:
    """QuartzNet 15x5 (Kriman et al., 2019, table 1)."""
    triples = ((256, 33), (256, 39), (512, 51), (512, 63), (512, 75))
    return _speech(
        batch,
        frames,
        blocks=tuple(triple for triple in triples for _ in range(3)),
        ends=((256, 33), (512, 87), (1024, 1)),
        dense=False,
        separable=True,
    )
