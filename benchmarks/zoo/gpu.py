"""List the models that are trained on a GPU, at the sizes that people train them.

Architectures come from this zoo and from transformers' configurations, with random weights;
each workload names two batch sizes whose steps fit a GPU with 80 GB.
"""

from __future__ import annotations

from typing import Any

from zoo.convolutional import Unet, mobilenet, vgg16
from zoo.inputs import (
    Workload,
    clicked_loss,
    clicks,
    configured,
    images,
    labelled_images,
    labelled_tokens,
    next_token_loss,
    pixel_loss,
    tokens,
)
from zoo.small import Dlrm, LanguageLstm, SwitchLanguageModel


def _language(name: str, batches: tuple[int, int], length: int, **options: Any) -> Workload:
    return Workload(
        name=name,
        batches=batches,
        build=configured("GPT2LMHeadModel", "GPT2Config", use_cache=False, **options),
        inputs=labelled_tokens(length, 50257),
    )


def _classifier(name: str, batches: tuple[int, int], family: str, **options: Any) -> Workload:
    return Workload(
        name=name,
        batches=batches,
        build=configured(
            f"{family}ForImageClassification", f"{family}Config", num_labels=1000, **options
        ),
        inputs=labelled_images(224, 1000),
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
}

# Those that tell most of the engine come first: what is not reached in the time is the end.
ALL = (
    _classifier("resnet50", (64, 16), "ResNet"),
    _language("gpt2", (8, 2), 1024),
    Workload(
        name="bert_base",
        batches=(32, 8),
        build=configured("BertForMaskedLM", "BertConfig"),
        inputs=labelled_tokens(256, 30_522),
    ),
    Workload(
        name="dlrm",
        batches=(16_384, 2048),
        build=lambda: Dlrm(tables=26, rows=100_000, width=64, dense=13).train(),
        inputs=clicks(26, 100_000),
        loss=clicked_loss,
    ),
    Workload(
        name="llama_1b",
        batches=(2, 1),
        build=configured("LlamaForCausalLM", "LlamaConfig", **_LLAMA_1B),
        inputs=labelled_tokens(1024, 32_000),
    ),
    _classifier("vit_b", (64, 16), "ViT"),
    Workload(
        name="lstm",
        batches=(128, 32),
        build=lambda: LanguageLstm(vocabulary=10_000, hidden=1024).train(),
        inputs=tokens(128, 10_000),
        loss=next_token_loss,
    ),
    _classifier("convnext_t", (64, 16), "ConvNext"),
    Workload(
        name="unet",
        batches=(16, 4),
        build=lambda: Unet(widths=(64, 128, 256, 512, 1024), classes=2).train(),
        inputs=images(256),
        loss=pixel_loss,
    ),
    Workload(
        name="switch_moe",
        batches=(8, 2),
        build=lambda: SwitchLanguageModel(
            vocabulary=32_000, length=512, width=768, blocks=8, experts=8
        ).train(),
        inputs=tokens(512, 32_000),
        loss=next_token_loss,
    ),
    _classifier("efficientnet_b0", (128, 32), "EfficientNet", **_EFFICIENTNET_B0),
    _classifier("swin_t", (64, 16), "Swin", drop_path_rate=0.0),
    Workload(
        name="t5_base",
        batches=(16, 4),
        build=configured("T5ForConditionalGeneration", "T5Config", **_T5_BASE),
        inputs=labelled_tokens(256, 32_128),
    ),
    Workload(
        name="bert_large",
        batches=(16, 4),
        build=configured(
            "BertForMaskedLM", "BertConfig", intermediate_size=4096, **_BERT_LARGE
        ),
        inputs=labelled_tokens(384, 30_522),
    ),
    _language("gpt2_medium", (4, 1), 1024, **_GPT2_MEDIUM),
    Workload(
        name="vgg16",
        batches=(64, 16),
        build=vgg16,
        inputs=labelled_images(224, 1000, "images"),
    ),
    Workload(
        name="mobilenet",
        batches=(64, 16),
        build=mobilenet,
        inputs=labelled_images(128, 100, "images"),
    ),
)  # fmt: skip

# Small enough for two CPU cores: the same code, tried where there is no GPU.
TINY = (
    Workload(
        name="tiny_gpt2",
        batches=(2, 1),
        build=configured(
            "GPT2LMHeadModel", "GPT2Config", use_cache=False, vocab_size=1000, n_positions=64,
            n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        ),
        inputs=labelled_tokens(64, 1000),
    ),
    Workload(
        name="tiny_unet",
        batches=(2, 1),
        build=lambda: Unet(widths=(8, 16, 32), classes=2).train(),
        inputs=images(48),
        loss=pixel_loss,
    ),
    Workload(
        name="tiny_lstm",
        batches=(4, 2),
        build=lambda: LanguageLstm(vocabulary=500, hidden=64).train(),
        inputs=tokens(16, 500),
        loss=next_token_loss,
    ),
)  # fmt: skip
BY_NAME = {workload.name: workload for workload in (*ALL, *TINY)}
