"""Draw architectures at random: of timm, of transformers, and of the zoo at random sizes.

`build` takes a name that `names_of` has given, so that a process of its own can build what another
has drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from traced_models import build_timm, positions_of
from traced_models import names_of as library_names
from zoo.convolutional import Unet
from zoo.inputs import own_loss, pixel_loss, random_tokens
from zoo.language import Decoder
from zoo.sequence import Translator, WordLstm, same_token_loss, translation_loss

Built = tuple[nn.Module, Any, Any]
# Steps of more parameters take minutes on one core: images have more values than short texts.
MOST_PARAMETERS = {"timm": 50_000_000, "transformers": 150_000_000, "own": 0}
LENGTH = 64


class GraphNetwork(nn.Module):
    """One head of attention a layer: softmax over the edges that reach a node, by scatter."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.values = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.scores = nn.ModuleList(nn.Linear(2 * width, 1) for _ in range(layers))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for layer, score in zip(self.values, self.scores, strict=True):
            values, index = layer(nodes), edges[1][:, None]
            pairs = torch.cat([values[edges[0]], values[edges[1]]], dim=1)
            weights = nn.functional.leaky_relu(score(pairs)).exp()
            total = torch.zeros_like(nodes[:, :1]).scatter_add(0, index, weights)
            messages = weights / total[edges[1]] * values[edges[0]]
            wide = index.expand(-1, nodes.shape[1])
            nodes = nodes + torch.zeros_like(nodes).scatter_add(0, wide, messages)
        return nodes


def _graph(rng: random.Random, batch: int, _again: bool) -> Built:
    """Nodes and edges are as many per graph of a batch; the graphs are joined into one."""
    width, nodes = rng.choice([32, 64, 96, 128]), batch * rng.choice([500, 1000, 2000])
    edges = torch.randint(0, nodes, (2, batch * rng.choice([4000, 8000, 20000])))
    model = GraphNetwork(rng.choice([2, 3, 4]), width)
    return model, (torch.randn(nodes, width), edges), lambda output, _batch: output.mean()


def _recurrent(rng: random.Random, batch: int, _again: bool) -> Built:
    vocabulary = rng.choice([1000, 5000, 10000])
    model = WordLstm(vocabulary=vocabulary, width=rng.choice([64, 128, 200, 256]))
    return model, random_tokens(4 * batch, rng.choice([35, 50, 100]), vocabulary), same_token_loss


def _decoder(rng: random.Random, batch: int, again: bool) -> Built:
    """Each block computed again in the backward pass if asked for."""
    width, key_heads, vocabulary = rng.choice([64, 128, 192]), rng.choice([None, 2, 4]), 2000
    sizes = {"width": width, "heads": 4, "hidden": 3 * width, "key_heads": key_heads}
    sizes |= {"layers": rng.choice([2, 3, 5]), "length": LENGTH, "vocabulary": vocabulary}
    model = Decoder(**sizes, recompute_every=int(again), fused=rng.random() < 0.5)
    return model, random_tokens(batch, LENGTH, vocabulary), own_loss


def _translation(rng: random.Random, batch: int, _again: bool) -> Built:
    width, vocabulary = rng.choice([64, 128]), rng.choice([1000, 3000])
    sizes = {"width": width, "heads": 4, "hidden": 2 * width, "layers": rng.choice([1, 2])}
    model = Translator(**sizes, vocabulary=vocabulary, shared=rng.random() < 0.5)
    length = rng.choice([20, 40])
    sentences = tuple(random_tokens(batch, length, vocabulary) for _ in range(2))
    return model, sentences, translation_loss


def _images(rng: random.Random, batch: int, _again: bool) -> Built:
    first = rng.choice([8, 12, 16])
    model = Unet(widths=tuple(first << level for level in range(rng.choice([3, 4]))), classes=2)
    side = rng.choice([48, 64])
    return model, torch.randn(batch, 3, side, side), pixel_loss


OWN: dict[str, Callable[[random.Random, int, bool], Built]] = {
    "graph": _graph,
    "recurrent": _recurrent,
    "decoder": _decoder,
    "translation": _translation,
    "images": _images,
}


def names_of(count: int, seed: int) -> list[str]:
    """So many architectures in turns of timm, transformers and our own, more than may be built.

    What is too large or cannot be built here is passed over by who runs them.
    """
    rng = random.Random(seed)
    libraries = [
        [f"{suite}:{name}" for name in rng.sample(library_names(suite), 3 * count)]
        for suite in ("timm", "transformers")
    ]
    own = [f"own:{kind}:{rng.randrange(1 << 30)}" for _ in range(count) for kind in OWN]
    return [name for group in zip(*libraries, own, strict=False) for name in group]


def size_of(name: str) -> int:
    """Parameters of an architecture of a library, without weights where that can be."""
    suite, _, rest = name.partition(":")
    if suite == "own":
        return 0
    if suite == "timm":
        model = build_timm(rest)
    else:
        from estimator.graph.models import load_model

        length = min(LENGTH, positions_of(rest))
        model = load_model(f"hf:{rest}", batch=1, seq_len=length, weights=False)[0]
    return sum(parameter.numel() for parameter in model.parameters())


def build(name: str, batch: int, *, again: bool) -> Built:
    """(model, batch, loss); `again` with activation checkpoints."""
    suite, _, rest = name.partition(":")
    if suite == "own":
        kind, _, seed = rest.partition(":")
        torch.manual_seed(int(seed))
        return OWN[kind](random.Random(int(seed)), batch, again)
    if suite == "timm":
        import timm

        model = timm.create_model(rest, pretrained=False).train()
        if again:
            model.set_grad_checkpointing()
        size = model.default_cfg.get("input_size") or (3, 224, 224)
        return model, torch.randn(batch, *size), lambda output, _batch: output.mean()
    from estimator.graph.models import load_model

    length = min(LENGTH, positions_of(rest))
    model, given, loss, _ = load_model(
        f"hf:{rest}" + (",gradient_checkpointing=true" if again else ""),
        batch=batch,
        seq_len=length,
    )
    return model, given, loss
