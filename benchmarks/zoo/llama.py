"""Build Llama as torchtitan writes it: separate projections, repeated key heads, a float32 loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.inputs import Built, own_loss, random_tokens
from zoo.language import GatedFeedForward


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.size, self.repeats = width // heads, heads // key_heads
        shared = key_heads * self.size
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, shared, bias=False) for _ in range(2))
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, states: Tensor, turns: Tensor) -> Tensor:
        batch, length, width = states.shape
        query, key, value = (
            part(states).view(batch, length, -1, self.size)
            for part in (self.query, self.key, self.value)
        )
        query, key = _turned(query, turns), _turned(key, turns)
        key, value = (each.repeat_interleave(self.repeats, dim=2) for each in (key, value))
        mixed = F.scaled_dot_product_attention(
            *(each.transpose(1, 2) for each in (query, key, value)), is_causal=True
        )
        projected: Tensor = self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return projected


def _turned(heads: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions on pairs of channels, in complex numbers and float32."""
    pairs = torch.view_as_complex(heads.float().reshape(*heads.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[:, None]).flatten(3).to(heads.dtype)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, key_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads, key_heads)
        self.feed = GatedFeedForward(width, hidden)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))

    def forward(self, states: Tensor, turns: Tensor) -> Tensor:
        states = states + self.attention(self.norms[0](states), turns)
        fed: Tensor = self.feed(self.norms[1](states))
        return states + fed


class Llama(nn.Module):
    """The whole model with its loss, whose logits are copied to float32."""

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        key_heads: int,
        layers: int,
        hidden: int,
        vocabulary: int,
        length: int,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, key_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.logits = nn.Linear(width, vocabulary, bias=False)
        turns = torch.zeros(length, width // heads // 2, dtype=torch.complex64)
        self.register_buffer("turns", turns)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        states = self.embedding(tokens)
        turns: Any = self.turns
        for block in self.blocks:
            states = block(states, turns)
        logits = self.logits(self.norm(states))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def llama(batch: int, **settings: Any) -> Built:
    """Llama without weights; `settings` are those of `Llama`."""
    with torch.device("meta"):
        model = Llama(**settings)
    tokens = random_tokens(batch, settings["length"], settings["vocabulary"])
    return model.train(), (tokens, tokens.clone()), own_loss
