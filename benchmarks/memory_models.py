"""Draw architectures at random: of timm, of transformers, and graph, recurrent and audio networks.

Sizes of the written-out networks are drawn too. `build` takes a name that `names_of` has given, so
that a process of its own can build what another has drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from traced_models import build_timm, positions_of
from traced_models import names_of as library_names

Built = tuple[nn.Module, Any, Any]
# Steps of more parameters take minutes on one core: images have more values than short texts.
MOST_PARAMETERS = {"timm": 50_000_000, "transformers": 150_000_000, "own": 0}
LENGTH = 64


class Blocks(nn.Module):
    """Blocks one after the other, each computed again in the backward pass if asked for."""

    def __init__(self, blocks: list[nn.Module], *, again: bool) -> None:
        super().__init__()
        self.blocks, self.again = nn.ModuleList(blocks), again

    def forward(self, values: Tensor, *more: Any) -> Tensor:
        for block in self.blocks:
            if self.again:
                values = checkpoint(block, values, *more, use_reentrant=False)
            else:
                values = block(values, *more)
        return values


class GraphConvolution(nn.Module):
    """Means of neighbours, gathered along edges and added up by node."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        messages = self.others(nodes)[edges[0]]
        summed = torch.zeros_like(nodes).index_add(0, edges[1], messages)
        return torch.relu(self.own(nodes) + summed)


class GraphAttention(nn.Module):
    """One head: softmax over the edges that reach a node, by scatter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.values, self.score = nn.Linear(width, width), nn.Linear(2 * width, 1)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        values = self.values(nodes)
        pairs = torch.cat([values[edges[0]], values[edges[1]]], dim=1)
        weights = torch.nn.functional.leaky_relu(self.score(pairs)).exp()
        total = torch.zeros_like(nodes[:, :1]).scatter_add(0, edges[1][:, None], weights)
        index = edges[1][:, None].expand(-1, nodes.shape[1])
        messages = weights / total[edges[1]] * values[edges[0]]
        return nodes + torch.zeros_like(nodes).scatter_add(0, index, messages)


class GraphNetwork(nn.Module):
    def __init__(self, blocks: list[nn.Module], width: int, *, again: bool) -> None:
        super().__init__()
        self.blocks, self.head = Blocks(blocks, again=again), nn.Linear(width, 7)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        return self.head(self.blocks(nodes, edges))


def graph_network(rng: random.Random, batch: int, *, again: bool) -> Built:
    """Nodes and edges are as many per graph of a batch; the graphs are joined into one."""
    width, layers = rng.choice([32, 64, 96, 128]), rng.choice([2, 3, 4])
    kind = rng.choice([GraphConvolution, GraphAttention])
    nodes, edges = rng.choice([500, 1000, 2000]), rng.choice([4000, 8000, 20000])
    model = GraphNetwork([kind(width) for _ in range(layers)], width, again=again)
    pairs = torch.randint(0, nodes * batch, (2, edges * batch))
    return model, (torch.randn(nodes * batch, width), pairs), lambda output, _batch: output.mean()


class Recurrent(nn.Module):
    """Tokens through recurrent layers to the next tokens."""

    def __init__(self, kind: Any, vocabulary: int, width: int, **settings: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.layers = kind(width, width, batch_first=True, **settings)
        out = width * (2 if settings.get("bidirectional") else 1)
        self.head = nn.Linear(out, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.table(tokens))[0])


def next_token(output: Tensor, batch: Any) -> Tensor:
    tokens = batch[0] if isinstance(batch, tuple) else batch
    return nn.functional.cross_entropy(output.flatten(0, 1), tokens.flatten())


def recurrent(rng: random.Random, batch: int, *, again: bool) -> Built:
    """Checkpoints do not reach into recurrent layers: the same model either way."""
    kind = rng.choice([nn.LSTM, nn.GRU, nn.RNN])
    width, vocabulary = rng.choice([64, 128, 200, 256]), rng.choice([1000, 5000, 10000])
    settings = {"num_layers": rng.choice([1, 2, 3]), "bidirectional": rng.random() < 0.4}
    if settings["num_layers"] > 1:
        settings["dropout"] = rng.choice([0.0, 0.2])
    model = Recurrent(kind, vocabulary, width, **settings)
    tokens = torch.randint(0, vocabulary, (4 * batch, rng.choice([35, 50, 100])))
    return model, tokens, next_token


class Dilated(nn.Module):
    """A gated block of WaveNet: dilated convolutions over time."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.pad = nn.ConstantPad1d((dilation, 0), 0.0)
        self.gates = nn.Conv1d(width, 2 * width, 2, dilation=dilation)
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, signal: Tensor) -> Tensor:
        value, gate = self.gates(self.pad(signal)).chunk(2, dim=1)
        return signal + self.out(torch.tanh(value) * torch.sigmoid(gate))


class Separable(nn.Module):
    """A block of Conv-TasNet: depthwise, dilated, normed over channels and time."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        inner = 2 * width
        self.layers = nn.Sequential(
            nn.Conv1d(width, inner, 1),
            nn.PReLU(),
            nn.GroupNorm(1, inner),
            nn.Conv1d(inner, inner, 3, padding=dilation, dilation=dilation, groups=inner),
            nn.PReLU(),
            nn.GroupNorm(1, inner),
            nn.Conv1d(inner, width, 1),
        )

    def forward(self, signal: Tensor) -> Tensor:
        return signal + self.layers(signal)


class Audio(nn.Module):
    """A learned filter bank, blocks over time, and the way back to a waveform."""

    def __init__(self, blocks: list[nn.Module], width: int, filter_size: int, again: bool) -> None:
        super().__init__()
        half = filter_size // 2
        self.encoder = nn.Conv1d(1, width, filter_size, stride=half)
        self.blocks = Blocks(blocks, again=again)
        self.decoder = nn.ConvTranspose1d(width, 1, filter_size, stride=half)

    def forward(self, wave: Tensor) -> Tensor:
        encoded = torch.relu(self.encoder(wave))
        return self.decoder(encoded * torch.sigmoid(self.blocks(encoded)))


def audio(rng: random.Random, batch: int, *, again: bool) -> Built:
    kind = rng.choice([Dilated, Separable])
    width, layers = rng.choice([32, 48, 64, 100]), rng.choice([4, 6, 8])
    blocks = [kind(width, 2 ** (layer % 6)) for layer in range(layers)]
    model = Audio(blocks, width, rng.choice([16, 20, 40]), again)
    wave = torch.randn(batch, 1, rng.choice([8000, 16000]))
    return model, wave, lambda output, _batch: output.square().mean()


class SmallConvolutions(nn.Module):
    """Spectrograms: small kernels, pooling, then a recurrent layer over time."""

    def __init__(self, widths: list[int], hidden: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 1
        for width in widths:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ELU()]
            layers += [nn.AvgPool2d(2)]
            channels = width
        self.features = nn.Sequential(*layers)
        self.time = nn.GRU(channels * (64 >> len(widths)), hidden, batch_first=True)
        self.head = nn.Linear(hidden, 10)

    def forward(self, spectrogram: Tensor) -> Tensor:
        found = self.features(spectrogram).permute(0, 3, 1, 2).flatten(2)
        return self.head(self.time(found)[0][:, -1])


def spectrograms(rng: random.Random, batch: int, *, again: bool) -> Built:
    """Nothing is checkpointed."""
    widths = [rng.choice([8, 12, 16]), rng.choice([24, 32]), rng.choice([32, 48])]
    model = SmallConvolutions(widths, rng.choice([32, 64]))
    images = torch.randn(2 * batch, 1, 64, rng.choice([128, 200]))
    return model, images, lambda output, _batch: output.logsumexp(1).mean()


OWN: dict[str, Callable[..., Built]] = {
    "graph": graph_network,
    "recurrent": recurrent,
    "audio": audio,
    "spectrograms": spectrograms,
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
        from estimator.graph.models.model_text import load_model

        length = min(LENGTH, positions_of(rest))
        model = load_model(f"hf:{rest}", batch=1, seq_len=length, weights=False)[0]
    return sum(parameter.numel() for parameter in model.parameters())


def build(name: str, batch: int, *, again: bool) -> Built:
    """(model, batch, loss); `again` with activation checkpoints."""
    suite, _, rest = name.partition(":")
    if suite == "own":
        kind, _, seed = rest.partition(":")
        torch.manual_seed(int(seed))
        return OWN[kind](random.Random(int(seed)), batch, again=again)
    if suite == "timm":
        import timm

        model = timm.create_model(rest, pretrained=False).train()
        if again:
            model.set_grad_checkpointing()
        size = model.default_cfg.get("input_size") or (3, 224, 224)
        return model, torch.randn(batch, *size), lambda output, _batch: output.mean()
    from estimator.graph.models.model_text import load_model

    length = min(LENGTH, positions_of(rest))
    model, given, loss, _ = load_model(
        f"hf:{rest}" + (",gradient_checkpointing=true" if again else ""),
        batch=batch,
        seq_len=length,
    )
    return model, given, loss
