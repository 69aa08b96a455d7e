"""Build the models of the schedulers' experiment: CNNs, RNNs, GANs and Transformers.

Each function returns ``(model, batch, loss)`` as MODEL texts ask, so that
``benchmarks/scheduler_models.py:resnet50`` can also stand in a job file or behind ``estimator
estimate``. Sizes are those of the papers named; weights are random.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from zoo.convolutional import classifier, cross_entropy, resnet, vgg16_layers
from zoo.inputs import Built, own_loss

# CNNs


def vgg16(batch: int = 16) -> Built:
    """VGG-16."""
    return classifier(vgg16_layers, batch, 224, 1000)


def resnet50(batch: int = 32) -> Built:
    """ResNet-50, He et al. 2016, table 1."""
    return resnet(batch, blocks=(3, 4, 6, 3))


def resnet101(batch: int = 16) -> Built:
    """ResNet-101, He et al. 2016, table 1."""
    return resnet(batch, blocks=(3, 4, 23, 3))


# RNNs


class _WordModel(nn.Module):
    """An embedding, recurrent layers and a projection to the vocabulary."""

    def __init__(self, vocabulary: int, width: int, layers: int, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.recurrent = kind(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(self.embedding(words))[0])


def _of_words(model: nn.Module, batch: int, length: int) -> Built:
    words = torch.zeros(batch, length, dtype=torch.long)
    return model, (words, words), cross_entropy


def lstm_words(batch: int = 64) -> Built:
    """The large LSTM of Zaremba et al. 2014: two layers of 1500, 35 words of Penn Treebank."""
    return _of_words(_WordModel(10_000, 1500, 2, nn.LSTM), batch, 35)


def gru_words(batch: int = 64) -> Built:
    """Three GRU layers of 1024 over 64 words of WikiText-2."""
    return _of_words(_WordModel(33_278, 1024, 3, nn.GRU), batch, 64)


class _Speech(nn.Module):
    """DeepSpeech 2, Amodei et al. 2016: convolutions, bidirectional recurrent layers, letters."""

    def __init__(self, width: int = 800, layers: int = 5) -> None:
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv2d(1, 32, (41, 11), stride=(2, 2), padding=(20, 5)),
            *(nn.BatchNorm2d(32), nn.Hardtanh(0, 20)),
            nn.Conv2d(32, 32, (21, 11), stride=(2, 1), padding=(10, 5)),
            *(nn.BatchNorm2d(32), nn.Hardtanh(0, 20)),
        )
        self.recurrent = nn.GRU(32 * 41, width, layers, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 29)

    def forward(self, sounds: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen = self.front(sounds).flatten(1, 2).transpose(1, 2)
        return self.head(self.recurrent(seen)[0])


def deepspeech2(batch: int = 16) -> Built:
    """DeepSpeech 2 on two seconds of sound; frames are labelled, which stands for CTC."""
    sounds, letters = torch.zeros(batch, 1, 161, 200), torch.zeros(batch, 100, dtype=torch.long)
    return _Speech(), (sounds, letters), cross_entropy


# GANs


class _Gan(nn.Module):
    """One step of both players: what the discriminator says of real and of made images."""

    def __init__(self, maker: nn.Module, judge: nn.Module) -> None:
        super().__init__()
        self.maker, self.judge = maker, judge

    def forward(self, noise: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        made = self.maker(noise)
        judged = self.judge(made.detach()), self.judge(images), self.judge(made)
        wrong = functional.softplus(judged[0]) + functional.softplus(-judged[1])
        return (wrong + functional.softplus(-judged[2])).mean()


def dcgan(batch: int = 128) -> Built:
    """DCGAN, Radford et al. 2016: 64 x 64 images from 100 numbers."""
    maker: list[nn.Module] = []
    channels, sizes = 100, (1024, 512, 256, 128)
    for number, width in enumerate(sizes):
        stride, padding = (2, 1) if number else (1, 0)
        maker += [nn.ConvTranspose2d(channels, width, 4, stride, padding, bias=False)]
        maker += [nn.BatchNorm2d(width), nn.ReLU(True)]
        channels = width
    maker += [nn.ConvTranspose2d(channels, 3, 4, 2, 1), nn.Tanh()]
    judge: list[nn.Module] = []
    channels = 3
    for width in reversed(sizes):
        judge += [nn.Conv2d(channels, width, 4, 2, 1, bias=False), nn.BatchNorm2d(width)]
        judge += [nn.LeakyReLU(0.2, inplace=True)]
        channels = width
    judge += [nn.Conv2d(channels, 1, 4, 1, 0), nn.Flatten()]
    model = _Gan(nn.Sequential(*maker), nn.Sequential(*judge))
    return model, (torch.zeros(batch, 100, 1, 1), torch.zeros(batch, 3, 64, 64)), own_loss


class _Translator(nn.Module):
    """The generator of Pix2Pix, Isola et al. 2017: a U-Net of eight levels."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 128, 256, 512, 512, 512, 512)
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(before, after, 4, 2, 1), nn.LeakyReLU(0.2))
            for before, after in zip((3, *widths[:-1]), widths, strict=True)
        )
        self.up = nn.ModuleList(
            nn.Sequential(
                nn.ConvTranspose2d(before * (1 if not level else 2), after, 4, 2, 1), nn.ReLU()
            )
            for level, (before, after) in enumerate(
                zip(reversed(widths), (*reversed(widths[:-1]), 3), strict=True)
            )
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in self.down:
            images = layer(images)
            kept.append(images)
        found = kept.pop()
        for level, layer in enumerate(self.up):
            found = layer(found if not level else torch.cat((found, kept.pop()), 1))
        return found


def pix2pix(batch: int = 8) -> Built:
    """Pix2Pix on 256 x 256 images with the discriminator of 70 x 70 patches."""
    judge: list[nn.Module] = []
    channels = 3
    for width, stride in ((64, 2), (128, 2), (256, 2), (512, 1)):
        judge += [nn.Conv2d(channels, width, 4, stride, 1), nn.LeakyReLU(0.2, inplace=True)]
        channels = width
    judge += [nn.Conv2d(channels, 1, 4, 1, 1), nn.Flatten()]
    images = torch.zeros(batch, 3, 256, 256)
    return _Gan(_Translator(), nn.Sequential(*judge)), (images, images), own_loss


# Transformers


class _Encoder(nn.Module):
    """A stack of encoder layers over words, with a projection to the vocabulary."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, batch_first=True, norm_first=True, activation="gelu"
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(words) + self.position))


def bert_base(batch: int = 16) -> Built:
    """The size of BERT-base, Devlin et al. 2019, on 128 words."""
    return _of_words(_Encoder(30_522, 768, 12, 12, 128), batch, 128)


def transformer_base(batch: int = 32) -> Built:
    """The encoder of Transformer-base, Vaswani et al. 2017, on 64 words."""
    return _of_words(_Encoder(37_000, 512, 6, 8, 64), batch, 64)


def gpt_small(batch: int = 4) -> Built:
    """The size of GPT-2 small, Radford et al. 2019, on 512 words."""
    return _of_words(_Encoder(50_257, 768, 12, 12, 512), batch, 512)


MODELS = {
    "cnn": ("vgg16", "resnet50", "resnet101"),
    "rnn": ("lstm_words", "gru_words", "deepspeech2"),
    "gan": ("dcgan", "pix2pix"),
    "transformer": ("bert_base", "transformer_base", "gpt_small"),
}
