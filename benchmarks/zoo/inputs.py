"""What models of the zoo are called with, and the losses of those that return none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor] | Tensor
Loss = Callable[[Any, Any], Tensor]
Built = tuple[nn.Module, Any, Loss | None]


def on_meta(build: Callable[..., nn.Module], **settings: Any) -> nn.Module:
    """A module to be trained, its weights without memory."""
    with torch.device("meta"):
        return build(**settings).train()


def random_tokens(batch: int, length: int, vocabulary: int) -> Tensor:
    """Sentences of one length."""
    return torch.randint(0, vocabulary, (batch, length))


def labelled_tokens(batch: int, length: int, vocabulary: int) -> Batch:
    """Sentences that are their own labels, as models of transformers take them."""
    sentences = random_tokens(batch, length, vocabulary)
    return {"input_ids": sentences, "labels": sentences.clone()}


def images(batch: int, size: int) -> Tensor:
    """Square images."""
    return torch.randn(batch, 3, size, size)


def labelled_images(batch: int, size: int, classes: int, name: str = "pixel_values") -> Batch:
    """Square images and their classes."""
    return {name: images(batch, size), "labels": torch.randint(0, classes, (batch,))}


def clicks(batch: int, tables: int, rows: int) -> Batch:
    """Dense features, and four rows of every table of categories."""
    categories = torch.randint(0, rows, (batch, tables, 4))
    return {"dense": torch.randn(batch, 13), "categories": categories}


def own_loss(output: Any, batch: Any) -> Tensor:
    """What the model returned is its loss."""
    return output  # type: ignore[no-any-return]


def next_token_loss(logits: Tensor, sentences: Tensor) -> Tensor:
    """Cross-entropy of each token's logits against the token after it."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), sentences[:, 1:].flatten())


def clicked_loss(scores: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Binary cross-entropy of scores against made-up clicks."""
    return F.binary_cross_entropy_with_logits(scores, (inputs["dense"][:, 0] > 0).float())


def pixel_loss(logits: Tensor, pixels: Tensor) -> Tensor:
    """Cross-entropy of two classes per pixel."""
    return F.cross_entropy(logits, (pixels[:, 0] > 0).long())
