"""List the small real architectures on which predictions are checked against real training.

Each function of `ALL` takes a batch size and returns ``(model, batch)`` or
``(model, batch, loss)``; its step takes tens to hundreds of milliseconds on one core. Transformers
are built from configurations with random weights; the others are written out in plain torch.nn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from zoo.convolutional import Labelled, Unet, small_resnet
from zoo.convolutional import mobilenet as half_mobilenet
from zoo.inputs import (
    Batch,
    Loss,
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
from zoo.small import Dlrm, LanguageLstm, Mixer, SwitchLanguageModel

Built = tuple[nn.Module, Batch] | tuple[nn.Module, Batch, Loss]
ALL: list[Callable[..., Built]] = []


def _function(
    name: str,
    batch: int,
    build: Callable[[], nn.Module],
    inputs: Callable[[int], Batch],
    loss: Loss | None = None,
) -> Callable[..., Built]:
    """A function of `ALL`: at a batch size, by default `batch`, it builds a model and a batch."""

    def make(batch: int = batch) -> Built:
        model = build().train()
        return (model, inputs(batch)) if loss is None else (model, inputs(batch), loss)

    make.__name__ = name
    ALL.append(make)
    return make


def _transformer(
    name: str, batch: int, model: str, inputs: Callable[[int], Batch], **settings: Any
) -> Callable[..., Built]:
    config = model.partition("For")[0].removesuffix("LMHeadModel") + "Config"
    return _function(name, batch, configured(model, config, **settings), inputs)


_TOKENS = labelled_tokens(128, 8192)
# Pre-norm decoder, learned positions, fused QKV, tied embeddings.
gpt2 = _transformer(
    "gpt2",
    4,
    "GPT2LMHeadModel",
    _TOKENS,
    vocab_size=8192,
    n_positions=256,
    n_embd=256,
    n_layer=4,
    n_head=8,
    bos_token_id=0,
    eos_token_id=0,
    use_cache=False,
)
# Post-norm encoder.
bert = _transformer(
    "bert",
    4,
    "BertForMaskedLM",
    _TOKENS,
    vocab_size=8192,
    hidden_size=320,
    num_hidden_layers=3,
    num_attention_heads=5,
    intermediate_size=1280,
    max_position_embeddings=256,
)
# RMS norm, rotary positions, grouped-query attention, gated feed-forward.
llama = _transformer(
    "llama",
    4,
    "LlamaForCausalLM",
    _TOKENS,
    vocab_size=8192,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=512,
    use_cache=False,
)
# Encoder and decoder with relative positions and cross-attention.
t5 = _transformer(
    "t5",
    4,
    "T5ForConditionalGeneration",
    _TOKENS,
    vocab_size=8192,
    d_model=256,
    d_kv=32,
    d_ff=1024,
    num_layers=2,
    num_heads=8,
    use_cache=False,
    decoder_start_token_id=0,
)
# One patch convolution, then a pre-norm encoder over the patches.
vit = _transformer(
    "vit",
    4,
    "ViTForImageClassification",
    labelled_images(112, 100),
    image_size=112,
    patch_size=8,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    intermediate_size=1024,
    num_labels=100,
)
# Attention within shifted windows, patches merged between stages.
swin = _transformer(
    "swin",
    6,
    "SwinForImageClassification",
    labelled_images(112, 100),
    image_size=112,
    patch_size=4,
    embed_dim=64,
    depths=[2, 2, 2],
    num_heads=[2, 4, 8],
    window_size=7,
    num_labels=100,
)
# 7x7 depthwise convolutions, channels-last feed-forward, layer scale.
convnext = _transformer(
    "convnext",
    6,
    "ConvNextForImageClassification",
    labelled_images(128, 100),
    image_size=128,
    hidden_sizes=[48, 96, 192, 384],
    depths=[2, 2, 3, 2],
    num_labels=100,
)
resnet = _function("resnet", 8, small_resnet, labelled_images(112, 100, "images"))
# Depthwise convolutions, memory-bound.
mobilenet = _function("mobilenet", 16, half_mobilenet, labelled_images(128, 100, "images"))
# A word-level language model over 48 steps.
lstm = _function(
    "lstm",
    16,
    lambda: LanguageLstm(vocabulary=6000, hidden=320),
    tokens(48, 6000),
    next_token_loss,
)
# MLP-Mixer with 4 blocks of 256 channels over 144 patches.
mlp_mixer = _function(
    "mlp_mixer",
    8,
    lambda: Labelled(Mixer(size=96, patch=8, channels=256, blocks=4, classes=100)),
    labelled_images(96, 100, "images"),
)
# DLRM with 10 tables of 40,000 rows: the update of the embeddings dominates.
recommender = _function(
    "recommender",
    1024,
    lambda: Dlrm(tables=10, rows=40_000, width=32, dense=13),
    clicks(10, 40_000),
    clicked_loss,
)
# U-Net with 4 levels on 80-pixel images, two classes per pixel.
unet = _function(
    "unet", 6, lambda: Unet(widths=(24, 48, 96, 192), classes=2), images(80), pixel_loss
)
# Switch Transformer: 8 experts per block, top-1 routing with fixed capacity.
switch_moe = _function(
    "switch_moe", 4,
    lambda: SwitchLanguageModel(vocabulary=4096, length=128, width=256, blocks=3, experts=8),
    tokens(128, 4096), next_token_loss,
)  # fmt: skip

# A Llama-like decoder whose feed-forward is 8 experts, 2 per token.
mixtral = _transformer(
    "mixtral",
    4,
    "MixtralForCausalLM",
    labelled_tokens(128, 4096),
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    num_local_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=256,
    use_cache=False,
)
