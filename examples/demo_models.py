"""Make two real architectures, small enough to train on two cores."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


def gpt2(
    batch: int = 8, *, layers: int = 6, vocabulary: int = 50257
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """GPT-2 of width 384, 6 layers and the full vocabulary: 30 M parameters, 64 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary, n_layer=layers, n_head=6, n_embd=384, use_cache=False
    )
    tokens = torch.randint(0, config.vocab_size, (batch, 64))
    return GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al., 2015, figure 2)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, inputs, height, width) to (batch, outputs, height/stride, width/stride)."""
        hidden = functional.relu(self.first_norm(self.first(images)))
        return functional.relu(self.second_norm(self.second(hidden)) + self.shortcut(images))


def resnet18(batch: int = 4) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], object]:
    """ResNet-18 on 224x224 images: 11.7 M parameters."""
    widths = (64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [
        ResidualBlock(inputs, outputs, stride=1 if inputs == outputs else 2)
        for inputs, outputs in zip((64, *widths), widths, strict=False)
    ]
    model = ImageClassifier(
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 1000),
    )
    images, labels = torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,))
    return model, (images, labels), cross_entropy


class ImageClassifier(nn.Sequential):
    """Takes the labels too, which only the loss looks at."""

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Scores of the classes; `labels` pass by."""
        return super().forward(images)


def cross_entropy(scores: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The loss of the scores against the labels of the batch."""
    return functional.cross_entropy(scores, batch[1])
