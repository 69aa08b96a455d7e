"""Build the recurrent, translation and speech models of published tables, without weights."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.inputs import Built, on_meta, own_loss, random_tokens
from zoo.small import LanguageLstm

Pair = tuple[int, int]


class DeepSpeech2(nn.Module):
    """Two convolutions over spectrograms, bidirectional GRUs with batch norm, characters."""

    def __init__(self, *, hidden: int, layers: int, characters: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 32, (41, 11), (2, 2), (20, 5)),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20, inplace=True),
            nn.Conv2d(32, 32, (21, 11), (2, 1), (10, 5)),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20, inplace=True),
        )
        self.recurrent = nn.ModuleList(
            nn.GRU(32 * 41 if layer == 0 else hidden, hidden, bidirectional=True)
            for layer in range(layers)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(hidden) for _ in range(layers))
        self.characters = nn.Linear(hidden, characters, bias=False)

    def forward(self, spectrograms: Tensor, texts: Tensor) -> Tensor:
        states = self.convolutions(spectrograms).flatten(1, 2).permute(2, 0, 1)
        for number, (norm, recurrent) in enumerate(zip(self.norms, self.recurrent, strict=True)):
            if number:
                frames, batch, width = states.shape
                states = norm(states.reshape(frames * batch, width)).view(frames, batch, width)
            both, _ = recurrent(states.contiguous())
            states = both.view(*both.shape[:2], 2, -1).sum(2)
        frames, batch, width = states.shape
        states = self.norms[0](states.reshape(frames * batch, width))
        return self.characters(states).view(frames, batch, -1)  # type: ignore[no-any-return]


def aligned_loss(scores: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of (frames, batch, classes) scores against characters spread over the frames.

    It stands for connectionist temporal classification, whose operator cannot be traced; that
    moves as many bytes, in one more kernel each way.
    """
    frames, texts = scores.shape[0], batch[1]
    spread = texts.repeat_interleave(-(-frames // texts.shape[1]), 1)[:, :frames]
    return F.nll_loss(scores.float().log_softmax(-1).flatten(0, 1), spread.t().flatten())


def deepspeech2(batch: int, *, frames: int, characters: int) -> Built:
    """DeepSpeech2 with the settings of AdaptDL's job: 161 frequencies, 5 GRUs of 800."""
    model = on_meta(DeepSpeech2, hidden=800, layers=5, characters=29)
    texts = torch.randint(1, 29, (batch, characters))
    return model, (torch.randn(batch, 1, 161, frames), texts), aligned_loss


def same_token_loss(scores: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy of scores against tokens in the same places."""
    return F.cross_entropy(scores.flatten(0, 1), tokens.flatten())


def word_lstm(batch: int, *, length: int) -> Built:
    """The word-level language model of PyTorch's examples (word_language_model) on WikiText-2."""
    model = on_meta(LanguageLstm, vocabulary=33278, hidden=200, drops_words=True)
    return model, random_tokens(batch, length, 33278), same_token_loss


class Translator(nn.Module):
    """An encoder-decoder Transformer (Vaswani et al., 2017) with shared embeddings."""

    def __init__(
        self, *, width: int, heads: int, hidden: int, layers: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, hidden, batch_first=True)
            for _ in range(layers)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, heads, hidden, batch_first=True)
            for _ in range(layers)
        )
        self.logits = nn.Linear(width, vocabulary, bias=False)
        self.logits.weight = self.embedding.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, states = self.embedding(source), self.embedding(target)
        for layer in self.encoder:
            memory = layer(memory)
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        for layer in self.decoder:
            states = layer(states, memory, tgt_mask=mask)
        return self.logits(states)  # type: ignore[no-any-return]


def translation_loss(scores: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Label-smoothed cross-entropy against the target sentence."""
    return F.cross_entropy(scores.flatten(0, 1), batch[1].flatten(), label_smoothing=0.1)


def translator(batch: int, *, length: int, vocabulary: int, **settings: Any) -> Built:
    """A Transformer for translation, on sentences of one length."""
    model = on_meta(Translator, vocabulary=vocabulary, **settings)
    return model, _sentences(batch, length, vocabulary), translation_loss


def _sentences(batch: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Those to be translated, and their translations."""
    source, target = (random_tokens(batch, length, vocabulary) for _ in range(2))
    return source, target


class RelativeBlock(nn.Module):
    """Transformer-XL's layer: attention to the memory too, with relative positions."""

    def __init__(self, *, width: int, heads: int, head_dim: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.joint = nn.Linear(width, 3 * heads * head_dim, bias=False)
        self.relative = nn.Linear(width, heads * head_dim, bias=False)
        self.content_bias = nn.Parameter(torch.empty(heads, 1, head_dim))
        self.place_bias = nn.Parameter(torch.empty(heads, 1, head_dim))
        self.project = nn.Linear(heads * head_dim, width, bias=False)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.feed = nn.Sequential(
            nn.Linear(width, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(0.1),
            nn.Linear(hidden, width),
            nn.Dropout(0.1),
        )

    def forward(self, states: Tensor, memory: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = states.shape
        joint = self.joint(torch.cat([memory, states], 1))
        span = joint.shape[1]
        query, key, value = (
            each.view(batch, span, self.heads, self.head_dim).transpose(1, 2)
            for each in joint.chunk(3, -1)
        )
        query = query[:, :, -length:]
        relative = self.relative(places).view(span, self.heads, self.head_dim).permute(1, 2, 0)
        by_content = (query + self.content_bias) @ key.transpose(2, 3)
        by_place = (query + self.place_bias) @ relative
        padded = F.pad(by_place, (1, 0)).view(batch, self.heads, span + 1, length)
        scores = by_content + padded[:, :, 1:].reshape(batch, self.heads, length, span)
        scores = (scores * self.head_dim**-0.5).masked_fill(mask, -65000.0)
        mixed = F.dropout(F.softmax(scores, -1), 0.1) @ value
        mixed = self.project(mixed.transpose(1, 2).reshape(batch, length, -1))
        states = self.norms[0](states + F.dropout(mixed, 0.1))
        return self.norms[1](states + self.feed(states))  # type: ignore[no-any-return]


class TransformerXl(nn.Module):
    """Transformer-XL and its adaptive softmax.

    The `head` most frequent words have embeddings of full width; the others are one cluster of
    `tail_width`, in which `tail_ratio` of the tokens lie.
    """

    def __init__(
        self, *, width: int, layers: int, vocabulary: int, head: int, tail_width: int,
        tail_ratio: float, **block: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding = nn.Embedding(head, width)
        self.tail = nn.Embedding(vocabulary - head, tail_width)
        self.widen = nn.Linear(tail_width, width, bias=False)
        self.narrow = nn.Linear(width, tail_width, bias=False)
        self.blocks = nn.ModuleList(RelativeBlock(width=width, **block) for _ in range(layers))
        self.tail_ratio = tail_ratio

    def forward(self, tokens: Tensor, memories: Tensor) -> Tensor:
        length, span = tokens.shape[1], tokens.shape[1] + memories.shape[2]
        rare = int(self.tail_ratio * length)
        states = self.embedding(tokens[:, rare:])
        states = torch.cat([self.widen(self.tail(tokens[:, :rare])), states], 1)
        states = states * self.embedding.embedding_dim**0.5
        places = torch.zeros(span, states.shape[-1], dtype=states.dtype)
        mask = torch.ones(length, span, dtype=torch.bool).triu(1 + span - length)
        for number, block in enumerate(self.blocks):
            states = block(states, memories[:, number].to(states.dtype), places, mask)
        frequent = F.linear(states.flatten(0, 1), self.embedding.weight)
        loss = F.cross_entropy(frequent, tokens.flatten())
        scores = F.linear(self.narrow(states[:, :rare].flatten(0, 1)), self.tail.weight)
        return loss + F.cross_entropy(scores, tokens[:, :rare].flatten())


def transformer_xl(batch: int, *, length: int, memory: int, **settings: Any) -> Built:
    """Transformer-XL on WikiText-103, memories of the segment before given as an input."""
    model = on_meta(TransformerXl, **settings)
    memories = torch.zeros(batch, settings["layers"], memory, settings["width"])
    tokens = random_tokens(batch, length, settings["head"])
    return model, (tokens, memories), own_loss


class Gnmt(nn.Module):
    """GNMT: LSTM encoder, attention by one layer, LSTM decoder that sees the context everywhere."""

    def __init__(self, *, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.both_ways = nn.LSTM(width, width, bidirectional=True, batch_first=True)
        self.encoder = nn.ModuleList(
            nn.LSTM(2 * width if layer == 0 else width, width, batch_first=True)
            for layer in range(layers - 1)
        )
        self.first = nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.ModuleList(
            nn.LSTM(2 * width, width, batch_first=True) for _ in range(layers - 1)
        )
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.score = nn.Parameter(torch.empty(width))
        self.logits = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = F.dropout(self.embedding(source), 0.2)
        memory, _ = self.both_ways(memory)
        for number, layer in enumerate(self.encoder):
            found, _ = layer(F.dropout(memory, 0.2))
            memory = found + memory if number else found
        states, _ = self.first(F.dropout(self.embedding(target), 0.2))
        mixed = torch.tanh(self.query(states)[:, :, None] + self.key(memory)[:, None])
        weights = F.softmax(mixed @ self.score, -1)
        context = weights @ memory
        for number, layer in enumerate(self.decoder):
            found, _ = layer(torch.cat([F.dropout(states, 0.2), context], -1))
            states = found + states if number else found
        return self.logits(states)  # type: ignore[no-any-return]


def gnmt(batch: int, *, length: int, vocabulary: int) -> Built:
    """GNMT v2 on sentences of one length."""
    model = on_meta(Gnmt, width=1024, layers=4, vocabulary=vocabulary)
    return model, _sentences(batch, length, vocabulary), translation_loss


class Ncf(nn.Module):
    """Neural collaborative filtering: factors multiplied, beside layers over joined factors."""

    def __init__(self, *, users: int, items: int, factors: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        joined = widths[0] // 2
        self.factors = nn.ModuleList(nn.Embedding(count, factors) for count in (users, items))
        self.deep = nn.ModuleList(nn.Embedding(count, joined) for count in (users, items))
        layers: list[nn.Module] = []
        for wide, narrow in pairwise(widths):
            layers += [nn.Linear(wide, narrow), nn.ReLU(inplace=True), nn.Dropout(0.5)]
        self.layers = nn.Sequential(*layers)
        self.score = nn.Linear(widths[-1] + factors, 1)

    def forward(self, users: Tensor, items: Tensor, clicks: Tensor) -> Tensor:
        product = self.factors[0](users) * self.factors[1](items)
        deep = self.layers(torch.cat([self.deep[0](users), self.deep[1](items)], -1))
        scores = self.score(torch.cat([product, deep], -1)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(scores, clicks)


def ncf(batch: int) -> Built:
    """NCF on MovieLens-20M: 138,493 users, 26,744 items, 64 factors, layers of 256 to 64."""
    sizes = {"users": 138493, "items": 26744}
    model = on_meta(Ncf, **sizes, factors=64, widths=(256, 256, 128, 64))
    users, items = (torch.randint(0, count, (batch,)) for count in sizes.values())
    return model, (users, items, torch.zeros(batch)), own_loss


# Mel-frequency features of a frame; convolutions of a block, and what is dropped after each.
_FEATURES, _REPEATS, _DROP = 64, 5, 0.2


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

    def __init__(self, shortcuts: list[int], channels: int, size: int, *, separable: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for repeat in range(_REPEATS):
            inputs = shortcuts[-1] if repeat == 0 else channels
            layers += _convolution(inputs, channels, size, separable=separable)
            if repeat < _REPEATS - 1:
                layers += [nn.ReLU(inplace=True), nn.Dropout(_DROP)]
        self.branch = nn.Sequential(*layers)
        self.shortcuts = nn.ModuleList(
            nn.Sequential(*_convolution(inputs, channels, 1)) for inputs in shortcuts
        )

    def forward(self, earlier: list[Tensor]) -> Tensor:
        states = self.branch(earlier[-1])
        for shortcut, inputs in zip(self.shortcuts, earlier[-len(self.shortcuts) :], strict=True):
            states = states + shortcut(inputs)
        return F.dropout(F.relu(states, inplace=True), _DROP)


class SpeechRecogniser(nn.Module):
    """Jasper, whose shortcuts come from all blocks, or QuartzNet, of `separable` convolutions.

    There are `alike` blocks of each of the (channels, size) of `blocks`; `ends` are those of the
    stem and of the head.
    """

    def __init__(
        self, blocks: Sequence[Pair], ends: Sequence[Pair], *, alike: int, separable: bool
    ) -> None:
        super().__init__()
        (first, size), (wide, wide_size), (last, _) = ends
        self.stem = nn.Sequential(
            *_convolution(_FEATURES, first, size, stride=2, separable=separable),
            nn.ReLU(inplace=True),
        )
        seen = [first]
        self.blocks = nn.ModuleList()
        for channels, kernel in (each for each in blocks for _ in range(alike)):
            shortcuts = seen[-1:] if separable else list(seen)
            self.blocks.append(SpeechBlock(shortcuts, channels, kernel, separable=separable))
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


def _speech(batch: int, frames: int, *sizes: Sequence[Pair], **kind: Any) -> Built:
    model = on_meta(lambda: SpeechRecogniser(*sizes, **kind))
    texts = torch.randint(1, 29, (batch, 170))
    return model, (torch.randn(batch, _FEATURES, frames), texts), aligned_loss


def jasper(batch: int, *, frames: int) -> Built:
    """Jasper 10x5 with dense residuals (Li et al., 2019, table 1)."""
    blocks = ((256, 11), (384, 13), (512, 17), (640, 21), (768, 25))
    ends = ((256, 11), (896, 29), (1024, 1))
    return _speech(batch, frames, blocks, ends, alike=2, separable=False)


def quartznet(batch: int, *, frames: int) -> Built:
    """QuartzNet 15x5 (Kriman et al., 2019, table 1)."""
    blocks = ((256, 33), (256, 39), (512, 51), (512, 63), (512, 75))
    ends = ((256, 33), (512, 87), (1024, 1))
    return _speech(batch, frames, blocks, ends, alike=3, separable=True)
