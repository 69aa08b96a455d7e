"""The graphs that are estimated: written by hand, traced from small models, known by summary."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from .perceptrons import perceptron, write_graph

Kind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A graph by name: which devices it is for, and how the package in use comes to it.

    Of a costly one fewer batches and machines are asked for.
    """

    name: str
    target: Kind
    graph: Callable[[Any, Path], Any]
    is_costly: bool = True


def _written(
    name: str, target: Kind, *widths: int, is_costly: bool = False, **details: Any
) -> Source:
    def graph(package: Any, folder: Path) -> Any:
        shape = perceptron(name, widths, target=target, **details)
        return package.OpGraph.load(write_graph(shape, folder / f"{name}.graph"))

    return Source(name=name, target=target, graph=graph, is_costly=is_costly)


def _traced(name: str, target: Kind, build: Callable[[], tuple[Any, Any]], **how: Any) -> Source:
    def graph(package: Any, folder: Path) -> Any:
        import torch

        torch.manual_seed(0)
        model, batch = build()
        return package.trace_model(model, batch, target=target, name=name, **how)

    return Source(name=name, target=target, graph=graph)


def _summary(name: str, target: Kind, **known: Any) -> Source:
    return Source(
        name=name,
        target=target,
        graph=lambda package, folder: package.OpGraph.from_summary(
            target=target, name=name, **known
        ),
    )


def _language_model(kind: Literal["gpt2", "llama"], *, is_checkpointed: bool = False) -> Any:
    """A transformer of a few layers, and a batch of tokens with their labels."""
    import torch
    import transformers

    if kind == "gpt2":
        small = {"n_layer": 3, "n_embd": 192, "n_head": 4, "vocab_size": 2000, "n_positions": 128}
        shape: Any = transformers.GPT2Config(**small)
        model: Any = transformers.GPT2LMHeadModel(shape)
    else:
        shape = transformers.LlamaConfig(
            num_hidden_layers=4,
            hidden_size=256,
            intermediate_size=640,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=3000,
            max_position_embeddings=256,
        )
        model = transformers.LlamaForCausalLM(shape)
    model.config.use_cache = False
    if is_checkpointed:
        model.gradient_checkpointing_enable()
    tokens = torch.randint(shape.vocab_size, (4, 64))
    return model.train(), {"input_ids": tokens, "labels": tokens}


def _images() -> Any:
    """A small convolutional net with batch norm, and a batch of images."""
    import torch
    from torch import nn

    layers: list[nn.Module] = []
    for inner, outer in ((3, 32), (32, 64), (64, 128)):
        layers += [
            nn.Conv2d(inner, outer, 3, stride=2, padding=1),
            nn.BatchNorm2d(outer),
            nn.ReLU(),
        ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    return model.train(), torch.randn(8, 3, 64, 64)


_gpt2 = partial(_language_model, "gpt2")
_llama = partial(_language_model, "llama")
_checkpointed = partial(_language_model, "llama", is_checkpointed=True)
_MIB = 1 << 20

SOURCES = (
    _written("mlp", "cpu", 32, 96, 256, 32),
    _written("mlp-blocks", "cpu", *[256] * 7, blocks=True, buffer_bytes=_MIB),
    _written("mlp-views", "cpu", 1000, 1000, 96, 1000, views=True, optimizer="sgd-momentum"),
    _written("mlp-deep", "cpu", *[512] * 25, blocks=True, is_costly=True),
    _written("mlp-untrained", "cpu", 32, 64, trained=False),
    _written("mlp-gpu", "cuda", 96, 1000, 256, 1000, buffer_bytes=4096),
    _written("mlp-blocks-gpu", "cuda", *[1000] * 6, blocks=True, views=True),
    _written("mlp-deep-gpu", "cuda", *[512] * 25, blocks=True, is_costly=True),
    _traced("gpt2", "cpu", _gpt2),
    _traced("llama", "cpu", _llama, optimizer="sgd"),
    _traced("cnn", "cpu", _images, optimizer="adam"),
    _traced("gpt2-gpu", "cuda", _gpt2),
    _traced("gpt2-amp", "cuda", _gpt2, precision="bf16-amp"),
    _traced("gpt2-compiled", "cuda", _gpt2, precision="bf16-amp", compiled=True),
    _traced("gpt2-replayed", "cuda", _gpt2, precision="tf32", compiled="cuda-graphs"),
    _traced("llama-bf16", "cuda", _llama, precision="bf16"),
    _traced("llama-checkpointed", "cuda", _checkpointed, precision="bf16"),
    _traced(
        "cnn-scaled",
        "cuda",
        _images,
        precision="fp16-amp",
        grad_scaler=True,
        channels_last=True,
        optimizer="sgd-momentum",
    ),
    _summary(
        "summary-cpu",
        "cpu",
        step_times=((4, 0.11), (16, 0.32)),
        machine="fast",
        parameter_bytes=24 * _MIB,
        tensors=30,
    ),
    _summary(
        "summary-gpu",
        "cuda",
        parameter_bytes=700 * _MIB,
        tensors=48,
        ready_ratios=tuple(math.sqrt((48 - index) / 48) for index in range(48)),
        flops_per_sample=8e11,
        activation_bytes_per_sample=90 * _MIB,
        tokens_per_sample=512,
        batch=4,
        precision="bf16-amp",
    ),
)
