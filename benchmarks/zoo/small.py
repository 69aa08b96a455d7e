"""Build the other small architectures that are trained for real, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.convolutional import Labelled


class LanguageLstm(nn.Module):
    """Embedding, two LSTM layers, dropout, of words too if asked for, vocabulary logits."""

    def __init__(self, *, vocabulary: int, hidden: int, drops_words: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.recurrent = nn.LSTM(hidden, hidden, num_layers=2, dropout=0.2, batch_first=True)
        self.dropout, self.drops_words = nn.Dropout(0.2), drops_words
        self.logits = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.embedding(tokens)
        states, _ = self.recurrent(self.dropout(words) if self.drops_words else words)
        return self.logits(self.dropout(states))  # type: ignore[no-any-return]


class MixerBlock(nn.Module):
    """MLP-Mixer's block: mix patches, then channels, each with its own norm and residual."""

    def __init__(self, *, patches: int, channels: int, token_hidden: int) -> None:
        super().__init__()
        self.token_norm = nn.LayerNorm(channels)
        self.tokens = nn.Sequential(
            nn.Linear(patches, token_hidden), nn.GELU(), nn.Linear(token_hidden, patches)
        )
        self.channel_norm = nn.LayerNorm(channels)
        self.channels = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)
        )

    def forward(self, patches: Tensor) -> Tensor:
        mixed = self.tokens(self.token_norm(patches).transpose(1, 2)).transpose(1, 2)
        patches = patches + mixed
        return patches + self.channels(self.channel_norm(patches))  # type: ignore[no-any-return]


class Mixer(nn.Module):
    """MLP-Mixer: patches, blocks, mean, classes."""

    def __init__(self, *, size: int, patch: int, channels: int, blocks: int, classes: int) -> None:
        super().__init__()
        patches = (size // patch) ** 2
        self.stem = nn.Conv2d(3, channels, patch, patch)
        self.blocks = nn.Sequential(
            *(
                MixerBlock(patches=patches, channels=channels, token_hidden=channels // 2)
                for _ in range(blocks)
            )
        )
        self.norm = nn.LayerNorm(channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.stem(images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(patches)).mean(1))  # type: ignore[no-any-return]


def labelled_mixer(**sizes: int) -> nn.Module:
    """A mixer called with images and labels, that returns its loss."""
    return Labelled(Mixer(**sizes))


class Dlrm(nn.Module):
    """DLRM: bottom MLP over dense features, embedding bags, pairwise dots, top MLP."""

    def __init__(self, *, tables: int, rows: int, width: int, dense: int) -> None:
        super().__init__()
        self.bottom = nn.Sequential(
            nn.Linear(dense, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU()
        )
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        pairs = tables * (tables + 1) // 2
        upper, lower = torch.triu_indices(tables + 1, tables + 1, 1)
        self.register_buffer("pairs", upper * (tables + 1) + lower)
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU()
        )
        self.score = nn.Linear(128, 1)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        bags = [table(categories[:, index]) for index, table in enumerate(self.tables)]
        features = torch.stack([bottom, *bags], dim=1)
        dots = torch.bmm(features, features.transpose(1, 2)).flatten(1)
        crossed = torch.cat([bottom, dots[:, self.pairs]], dim=1)
        return self.score(self.top(crossed)).squeeze(1)  # type: ignore[no-any-return]


class SwitchFeedForward(nn.Module):
    """Top-1 experts with a fixed capacity, dispatched by einsum (Switch Transformer)."""

    def __init__(self, *, width: int, hidden: int, experts: int, capacity_factor: float) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.expand = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.contract = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)
        self.capacity_factor = capacity_factor

    def forward(self, tokens: Tensor) -> Tensor:
        groups, length, _ = tokens.shape
        experts = self.expand.shape[0]
        capacity = int(self.capacity_factor * length / experts)
        chances = self.router(tokens).softmax(-1)
        gate, choice = chances.max(-1)
        chosen = F.one_hot(choice, experts)
        place = (chosen.cumsum(1) - 1) * chosen
        kept = chosen * (place < capacity)
        # A token beyond its expert's capacity is dropped: its row of the dispatch mask is zero.
        slot = F.one_hot(place.clamp(max=capacity - 1), capacity) * kept.unsqueeze(-1)
        dispatch = slot.to(tokens.dtype)
        routed = torch.einsum("glec,gld->egcd", dispatch, tokens).reshape(
            experts, groups * capacity, -1
        )
        answers = torch.bmm(F.relu(torch.bmm(routed, self.expand)), self.contract)
        answers = answers.reshape(experts, groups, capacity, -1)
        return torch.einsum("glec,egcd->gld", dispatch * gate[..., None, None], answers)


class SwitchBlock(nn.Module):
    """Pre-norm causal attention, then the expert feed-forward."""

    def __init__(self, *, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed = SwitchFeedForward(
            width=width, hidden=4 * width, experts=experts, capacity_factor=1.25
        )

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length, width = tokens.shape
        joint = self.query_key_value(self.attention_norm(tokens))
        query, key, value = (
            joint.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        )
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        tokens = tokens + self.project(heads.transpose(1, 2).reshape(batch, length, width))
        return tokens + self.feed(self.feed_norm(tokens))  # type: ignore[no-any-return]


class SwitchLanguageModel(nn.Module):
    """A decoder of Switch blocks; embeddings and logits share no weights."""

    def __init__(
        self, *, vocabulary: int, length: int, width: int, blocks: int, experts: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.Sequential(
            *(SwitchBlock(width=width, heads=8, experts=experts) for _ in range(blocks))
        )
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        return self.logits(self.norm(self.blocks(hidden)))  # type: ignore[no-any-return]
