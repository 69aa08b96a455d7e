"""Small models that tensor parallelism can divide, for checks of split graphs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from zoo.inputs import labelled_images

_KNOWN = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
WORDS, WIDTH, INNER, HEADS, TOKENS, BATCH = 512, 64, 128, 8, 32, 4
# Of types that do not predict the next token.
_HEADS = {**dict.fromkeys(("bert", "roberta", "electra"), "MaskedLM"), "vit": "ImageClassification"}


class Case(NamedTuple):
    """A model and its batch; `sequence` says that its tokens can be divided without its help."""

    name: str
    make: Callable[[], tuple[nn.Module, Any]]
    sequence: bool = False
    loss: Any = None


class Block(nn.Module):
    """Attention and an MLP, each behind a norm; `gated` as Llama's."""

    def __init__(self, width: int, inner: int, heads: int, *, gated: bool, bias: bool) -> None:
        super().__init__()
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.first_norm, self.second_norm = norm(width), norm(width)
        self.query = nn.Linear(width, width, bias=bias)
        self.key = nn.Linear(width, width, bias=bias)
        self.value = nn.Linear(width, width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.up = nn.Linear(width, inner, bias=bias)
        self.gate = nn.Linear(width, inner, bias=bias) if gated else None
        self.down = nn.Linear(inner, width, bias=bias)
        self.head_width = width // heads

    def forward(self, x: Tensor) -> Tensor:
        y = self.first_norm(x)
        q, k, v = (
            layer(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.second_norm(x)
        up = self.up(y)
        wide = (
            nn.functional.gelu(up) if self.gate is None else nn.functional.silu(self.gate(y)) * up
        )
        return x + self.down(wide)


class Decoder(nn.Module):
    """A language model that asks nothing of how many tokens a rank has."""

    def __init__(
        self,
        *,
        width: int = WIDTH,
        inner: int = INNER,
        heads: int = HEADS,
        layers: int = 2,
        words: int = WORDS,
        gated: bool = True,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            Block(width, inner, heads, gated=gated, bias=bias) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width) if gated else nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def decoder(**sizes: Any) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: (Decoder(**sizes), torch.zeros(BATCH, TOKENS, dtype=torch.long))


def of_transformers(
    kind: str, ids: Tensor | None = None, **sizes: Any
) -> Callable[[], tuple[nn.Module, Any]]:
    """A model of a type with random weights, and `ids` or other inputs with their labels."""

    def make() -> tuple[nn.Module, Any]:
        import transformers

        config = transformers.AutoConfig.for_model(kind, use_cache=False, **sizes)
        head = getattr(transformers, f"AutoModelFor{_HEADS.get(kind, 'CausalLM')}")
        model = head.from_config(config).train()
        if kind == "vit":
            return model, labelled_images(BATCH, 32, 1)
        given = torch.randint(3, 100, (BATCH, TOKENS)) if ids is None else ids
        return model, {"input_ids": given, "labels": given}

    return make


def _decoders(kind: str) -> tuple[Case, ...]:
    return tuple(Case(name, decoder(**s), sequence=True) for name, s in _KNOWN[kind].items())


MODELS = (
    *_decoders("decoders"),
    *(
        Case(kind, of_transformers(kind, **_KNOWN["settings"].get(base, {}), **more))
        for kind, (base, more) in _KNOWN["transformers"].items()
    ),
)
# Models that ranks train for real.
TRAINED = _decoders("trained")
# Families whose configs have a plan for experts, and whose experts are grouped matmuls.
_USUAL = _KNOWN["settings"]["usual"] | _KNOWN["settings"]["experts"]
EXPERT_CASES = tuple(
    Case(kind, of_transformers(kind, **_USUAL, **more)) for kind, more in _KNOWN["experts"].items()
)
# How many every layer has, in one group, and to how many each token goes.
EXPERTS, CHOSEN = _USUAL["num_experts"], _USUAL["num_experts_per_tok"]
