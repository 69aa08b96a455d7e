"""Define the models that are trained on a GPU, at the sizes that people train them.

Architectures come from `local_models` and from transformers' configurations, with random weights;
each workload names two batch sizes whose steps fit a GPU with 80 GB.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import local_models
import torch
from local_models import Batch
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[Any, Any], Tensor]


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


def _tokens(length: int, vocabulary: int) -> Callable[[int], Batch]:
    def make(batch: int) -> Batch:
        tokens = torch.randint(0, vocabulary, (batch, length))
        return {"input_ids": tokens, "labels": tokens.clone()}

    return make


def _images(size: int, classes: int, name: str = "pixel_values") -> Callable[[int], Batch]:
    def make(batch: int) -> Batch:
        labels = torch.randint(0, classes, (batch,))
        return {name: torch.randn(batch, 3, size, size), "labels": labels}

    return make


def _configured(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """A transformers model of the configuration's defaults, but for the options."""

    def build() -> nn.Module:
        import transformers

        settings = getattr(transformers, config)(**options)
        built: nn.Module = getattr(transformers, model)(settings)
        return built.train()

    return build


def _vgg16() -> nn.Module:
    """VGG-16 without batch norm (Simonyan and Zisserman 2015), configuration D."""
    layers: list[nn.Module] = []
    channels = 3
    for width, repeats in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(repeats):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    head: list[nn.Module] = [nn.Flatten()]
    for inputs in (512 * 7 * 7, 4096):
        head += [nn.Linear(inputs, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    return local_models.Labelled(nn.Sequential(*layers, *head, nn.Linear(4096, 1000))).train()


def _next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _clicked_loss(scores: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, (inputs["dense"][:, 0] > 0).float())


def _pixel_loss(logits: Tensor, images: Tensor) -> Tensor:
    return F.cross_entropy(logits, (images[:, 0] > 0).long())


def _categories(tables: int, rows: int) -> Callable[[int], Batch]:
    def make(batch: int) -> Batch:
        categories = torch.randint(0, rows, (batch, tables, 4))
        return {"dense": torch.randn(batch, 13), "categories": categories}

    return make


def _mobilenet() -> nn.Module:
    model, _, *_ = local_models.mobilenet(1)
    return model


def _language(name: str, batches: tuple[int, int], length: int, **options: Any) -> Workload:
    return Workload(
        name=name,
        batches=batches,
        build=_configured("GPT2LMHeadModel", "GPT2Config", use_cache=False, **options),
        inputs=_tokens(length, 50257),
    )


_BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
_GPT2_MEDIUM = {"n_embd": 1024, "n_layer": 24, "n_head": 16}
_LLAMA_1B = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "use_cache": False,
}
_T5_BASE = {
    "d_model": 768,
    "d_ff": 3072,
    "num_layers": 12,
    "num_heads": 12,
    "use_cache": False,
    "decoder_start_token_id": 0,
}
_EFFICIENTNET_B0 = {
    "image_size": 224,
    "width_coefficient": 1.0,
    "depth_coefficient": 1.0,
    "hidden_dim": 1280,
    "dropout_rate": 0.2,
    "num_labels": 1000,
}

# Those that tell most of the engine come first: what is not reached in the time is the end.
ALL = (
    Workload(
        name="resnet50",
        batches=(64, 16),
        build=_configured("ResNetForImageClassification", "ResNetConfig", num_labels=1000),
        inputs=_images(224, 1000),
    ),
    _language("gpt2", (8, 2), 1024),
    Workload(
        name="bert_base",
        batches=(32, 8),
        build=_configured("BertForMaskedLM", "BertConfig"),
        inputs=_tokens(256, 30_522),
    ),
    Workload(
        name="dlrm",
        batches=(16_384, 2048),
        build=lambda: local_models.Dlrm(tables=26, rows=100_000, width=64, dense=13).train(),
        inputs=_categories(26, 100_000),
        loss=_clicked_loss,
    ),
    Workload(
        name="llama_1b",
        batches=(2, 1),
        build=_configured("LlamaForCausalLM", "LlamaConfig", **_LLAMA_1B),
        inputs=_tokens(1024, 32_000),
    ),
    Workload(
        name="vit_b",
        batches=(64, 16),
        build=_configured("ViTForImageClassification", "ViTConfig", num_labels=1000),
        inputs=_images(224, 1000),
    ),
    Workload(
        name="lstm",
        batches=(128, 32),
        build=lambda: local_models.LanguageLstm(vocabulary=10_000, hidden=1024).train(),
        inputs=lambda batch: torch.randint(0, 10_000, (batch, 128)),
        loss=_next_token_loss,
    ),
    Workload(
        name="convnext_t",
        batches=(64, 16),
        build=_configured("ConvNextForImageClassification", "ConvNextConfig", num_labels=1000),
        inputs=_images(224, 1000),
    ),
    Workload(
        name="unet",
        batches=(16, 4),
        build=lambda: local_models.Unet(widths=(64, 128, 256, 512, 1024), classes=2).train(),
        inputs=lambda batch: torch.randn(batch, 3, 256, 256),
        loss=_pixel_loss,
    ),
    Workload(
        name="switch_moe",
        batches=(8, 2),
        build=lambda: local_models.SwitchLanguageModel(
            vocabulary=32_000, length=512, width=768, blocks=8, experts=8
        ).train(),
        inputs=lambda batch: torch.randint(0, 32_000, (batch, 512)),
        loss=_next_token_loss,
    ),
    Workload(
        name="efficientnet_b0",
        batches=(128, 32),
        build=_configured(
            "EfficientNetForImageClassification", "EfficientNetConfig", **_EFFICIENTNET_B0
        ),
        inputs=_images(224, 1000),
    ),
    Workload(
        name="swin_t",
        batches=(64, 16),
        build=_configured(
            "SwinForImageClassification", "SwinConfig", drop_path_rate=0.0, num_labels=1000
        ),
        inputs=_images(224, 1000),
    ),
    Workload(
        name="t5_base",
        batches=(16, 4),
        build=_configured("T5ForConditionalGeneration", "T5Config", **_T5_BASE),
        inputs=_tokens(256, 32_128),
    ),
    Workload(
        name="bert_large",
        batches=(16, 4),
        build=_configured(
            "BertForMaskedLM", "BertConfig", intermediate_size=4096, **_BERT_LARGE
        ),
        inputs=_tokens(384, 30_522),
    ),
    _language("gpt2_medium", (4, 1), 1024, **_GPT2_MEDIUM),
    Workload(
        name="vgg16",
        batches=(64, 16),
        build=_vgg16,
        inputs=_images(224, 1000, "images"),
    ),
    Workload(
        name="mobilenet",
        batches=(64, 16),
        build=_mobilenet,
        inputs=_images(128, 100, "images"),
    ),
)  # fmt: skip

# Small enough for two CPU cores: the same code, tried where there is no GPU.
TINY = (
    Workload(
        name="tiny_gpt2",
        batches=(2, 1),
        build=_configured(
            "GPT2LMHeadModel", "GPT2Config", use_cache=False, vocab_size=1000, n_positions=64,
            n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        ),
        inputs=_tokens(64, 1000),
    ),
    Workload(
        name="tiny_unet",
        batches=(2, 1),
        build=lambda: local_models.Unet(widths=(8, 16, 32), classes=2).train(),
        inputs=lambda batch: torch.randn(batch, 3, 48, 48),
        loss=_pixel_loss,
    ),
    Workload(
        name="tiny_lstm",
        batches=(4, 2),
        build=lambda: local_models.LanguageLstm(vocabulary=500, hidden=64).train(),
        inputs=lambda batch: torch.randint(0, 500, (batch, 16)),
        loss=_next_token_loss,
    ),
)  # fmt: skip
BY_NAME = {workload.name: workload for workload in (*ALL, *TINY)}
