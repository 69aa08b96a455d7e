"""Build the language models of published tables from their configurations, without weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from estimator.graph.models.transformers_models import WithoutWeights
from zoo.inputs import Built, on_meta, own_loss, random_tokens


def recomputed(block: nn.Module, *arguments: Any) -> Any:
    """The block under activation checkpointing: its forward is run again in backward."""
    return checkpoint(block, *arguments, use_reentrant=False)


class GatedFeedForward(nn.Module):
    """Llama's feed-forward: SiLU of a gate times a widened copy, narrowed again."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(states)) * self.up(states))  # type: ignore[no-any-return]


class DecoderBlock(nn.Module):
    """Pre-norm causal attention and feed-forward; with `key_heads`, Llama's kind, else GPT's.

    `separate`, as torchtitan has it: a projection each, and key heads repeated for the kernel.
    """

    def __init__(
        self, width: int, heads: int, *, hidden: int, key_heads: int | None, biased: bool,
        fused: bool = True, mask: str | None = None, drop: float = 0.0, separate: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.fused, self.mask, self.drop = fused, mask, drop
        self.repeats = heads // (key_heads or heads) if separate else 1
        self.head_dim, self.key_heads = width // heads, key_heads or heads
        self.rotary = key_heads is not None
        shared = 2 * self.key_heads * self.head_dim
        outs = (width, shared // 2, shared // 2) if separate else (width + shared,)
        self.joint = nn.ModuleList(nn.Linear(width, out, bias=biased) for out in outs)
        self.project = nn.Linear(width, width, bias=biased)
        self.feed: nn.Module
        if self.rotary:
            self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
            self.feed = GatedFeedForward(width, hidden)
        else:
            self.norms = nn.ModuleList(nn.LayerNorm(width, bias=biased) for _ in range(2))
            self.feed = nn.Sequential(
                nn.Linear(width, hidden, bias=biased),
                nn.GELU(),
                nn.Linear(hidden, width, bias=biased),
            )

    def forward(self, states: Tensor, turns: Tensor | None) -> Tensor:
        batch, length, width = states.shape
        keys = self.key_heads * self.head_dim
        normed = self.norms[0](states)
        joint = [layer(normed) for layer in self.joint]
        if len(joint) == 1:
            joint = joint[0].split([width, keys, keys], dim=-1)
        query, key, value = (each.view(batch, length, -1, self.head_dim) for each in joint)
        if turns is not None:
            query, key = _turned(query, turns), _turned(key, turns)
        if self.repeats > 1:
            key, value = (each.repeat_interleave(self.repeats, dim=2) for each in (key, value))
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        if self.fused:
            grouped = self.rotary and self.repeats == 1
            mixed = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=grouped
            )
        else:
            mixed = _written_out_attention(query, key, value, self.mask, self.drop)
        mixed = self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        states = states + F.dropout(mixed, self.drop)
        return states + F.dropout(self.feed(self.norms[1](states)), self.drop)


def _written_out_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: str | None, drop: float
) -> Tensor:
    """Causal attention as products and a softmax, which scales and masks itself where `mask` is
    None; else scores are scaled, and masked as a "copy" or "in place", by kernels of their own."""
    scale, length = query.shape[-1] ** -0.5, query.shape[-2]
    if mask is None:
        scores = (query * scale) @ key.transpose(2, 3)
    else:
        later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        scores = query @ key.transpose(2, 3)
        if mask == "in place":
            scores = scores.masked_fill_(later, -torch.inf) * scale
        else:
            scores = (scores * scale).masked_fill(later, -torch.inf)
    return F.dropout(F.softmax(scores, -1), drop) @ value


def _turned(heads: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions on pairs of channels, in complex numbers and float32 as torchtitan does."""
    pairs = torch.view_as_complex(heads.float().reshape(*heads.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[:, None]).flatten(3).to(heads.dtype)


class Decoder(nn.Module):
    """A decoder and its loss.

    Of `recompute_every` blocks one is run again in backward (0: none); with `wide_loss` logits are
    copied to float32. Where targets come `shifted` from the loader, every token has one. Of blocks
    without `fused` attention it is written out, as `mask` says.
    """

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        layers: int,
        length: int,
        vocabulary: int,
        hidden: int,
        key_heads: int | None = None,
        tied: bool = True,
        biased: bool = False,
        recompute_every: int = 0,
        wide_loss: bool = False,
        shifted: bool = False,
        **block: Any,
    ) -> None:
        super().__init__()
        self.shifted = shifted
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = None if key_heads else nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            DecoderBlock(width, heads, hidden=hidden, key_heads=key_heads, biased=biased, **block)
            for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width) if key_heads else nn.LayerNorm(width, bias=biased)
        self.logits = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.logits.weight = self.embedding.weight
        self.recompute_every, self.wide_loss = recompute_every, wide_loss
        if key_heads:
            angles = torch.zeros(length, width // heads // 2, dtype=torch.complex64)
            self.register_buffer("turns", angles)

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.embedding(tokens)
        turns: Any = None
        if self.positions is None:
            turns = self.turns
        else:
            states = states + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for number, block in enumerate(self.blocks):
            if self.recompute_every and number % self.recompute_every == 0:
                states = recomputed(block, states, turns)
            else:
                states = block(states, turns)
        logits = self.logits(self.norm(states))
        if self.wide_loss:
            logits = logits.float()
        if self.shifted:
            return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def decoder(batch: int, **settings: Any) -> Built:
    """A GPT- or Llama-like language model; `settings` are those of `Decoder`."""
    tokens = random_tokens(batch, settings["length"], settings["vocabulary"])
    return on_meta(Decoder, **settings), tokens, own_loss


def from_transformers(
    batch: int,
    *,
    kind: str,
    head: str,
    length: int,
    attention: str = "eager",
    training: bool = True,
    **settings: Any,
) -> Built:
    """A model of transformers with random weights; not `training`: in eval mode, without labels."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, use_cache=False, **settings)
    with WithoutWeights():
        auto = getattr(transformers, f"AutoModelFor{head}")
        model = auto.from_config(config, attn_implementation=attention)
    tokens = random_tokens(batch, length, config.vocab_size)
    inputs: dict[str, Tensor] = {"input_ids": tokens}
    if kind == "bert":
        inputs["token_type_ids"] = torch.zeros_like(tokens)
        inputs["attention_mask"] = torch.ones_like(tokens)
    if training:
        inputs.update(_labels(head, tokens, length))
    return model.train(training), inputs, None


def _labels(head: str, tokens: Tensor, length: int) -> dict[str, Tensor]:
    first = tokens[:, 0]
    if head == "QuestionAnswering":
        places = torch.randint(0, length, first.shape)
        return {"start_positions": places, "end_positions": places.clone()}
    if head == "PreTraining":
        follows = torch.randint(0, 2, first.shape)
        return {"labels": tokens.clone(), "next_sentence_label": follows}
    if head == "SequenceClassification":
        return {"labels": torch.randint(0, 2, first.shape)}
    return {"labels": tokens.clone()}
