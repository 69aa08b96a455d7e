"""What models of the zoo are called with, and the losses of those that return none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor] | Tensor
Loss = Callable[[Any, Any], Tensor]
Built = tuple[nn.Module, Any, Loss | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, what it is called with at a batch size, and the two batch sizes to try.

    `build` and `inputs` make their tensors on torch's default device.
    """

    name: str
    batches: tuple[int, int]
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Batch]
    loss: Loss | None = None


def random_tokens(batch: int, length: int, vocabulary: int) -> Tensor:
    """Sentences of one length."""
    return torch.randint(0, vocabulary, (batch, length))


def tokens(length: int, vocabulary: int) -> Callable[[int], Batch]:
    """Sentences, as inputs of a workload."""
    return lambda batch: random_tokens(batch, length, vocabulary)


def labelled_tokens(length: int, vocabulary: int) -> Callable[[int], Batch]:
    """Sentences that are their own labels, as models of transformers take them."""

    def make(batch: int) -> Batch:
        sentences = random_tokens(batch, length, vocabulary)
        return {"input_ids": sentences, "labels": sentences.clone()}

    return make


def labelled_images(size: int, classes: int, name: str = "pixel_values") -> Callable[[int], Batch]:
    """Square images and their classes."""

    def make(batch: int) -> Batch:
        images = torch.randn(batch, 3, size, size)
        return {name: images, "labels": torch.randint(0, classes, (batch,))}

    return make


def images(size: int) -> Callable[[int], Batch]:
    """Square images."""
    return lambda batch: torch.randn(batch, 3, size, size)


def clicks(tables: int, rows: int) -> Callable[[int], Batch]:
    """Dense features, and four rows of every table of categories."""

    def make(batch: int) -> Batch:
        categories = torch.randint(0, rows, (batch, tables, 4))
        return {"dense": torch.randn(batch, 13), "categories": categories}

    return make


def own_loss(output: Any, batch: Any) -> Tensor:
    """What the model returned is its loss."""
    loss: Tensor = output
    return loss


def next_token_loss(logits: Tensor, sentences: Tensor) -> Tensor:
    """Cross-entropy of each token's logits against the token after it."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), sentences[:, 1:].flatten())


def clicked_loss(scores: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Binary cross-entropy of scores against made-up clicks."""
    return F.binary_cross_entropy_with_logits(scores, (inputs["dense"][:, 0] > 0).float())


def pixel_loss(logits: Tensor, pixels: Tensor) -> Tensor:
    """Cross-entropy of two classes per pixel."""
    return F.cross_entropy(logits, (pixels[:, 0] > 0).long())


def configured(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """A transformers model of the configuration's defaults, but for the options."""

    def build() -> nn.Module:
        import transformers

        settings = getattr(transformers, config)(**options)
        built: nn.Module = getattr(transformers, model)(settings)
        return built.train()

    return build
