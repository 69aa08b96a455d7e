"""Define the small real architectures on which predictions are checked against real training.

Each function of `ALL` takes a batch size and returns ``(model, batch)`` or
``(model, batch, loss)``; its step takes tens to hundreds of milliseconds on one core. Transformers
are built from configurations with random weights; the others are written out in plain torch.nn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor] | Tensor
Built = tuple[nn.Module, Batch] | tuple[nn.Module, Batch, Callable[[Any, Any], Tensor]]


def _tokens(batch: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (batch, length))


def _labelled_tokens(batch: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    tokens = _tokens(batch, length, vocabulary)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _labelled_images(batch: int, size: int, classes: int, name: str) -> dict[str, Tensor]:
    return {name: torch.randn(batch, 3, size, size), "labels": torch.randint(0, classes, (batch,))}


def gpt2(batch: int = 4) -> Built:
    """GPT-2: pre-norm decoder, learned positions, fused QKV, tied embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=8192,
        n_positions=256,
        n_embd=256,
        n_layer=4,
        n_head=8,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config).train(), _labelled_tokens(batch, 128, config.vocab_size)


def bert(batch: int = 4) -> Built:
    """BERT for masked language modelling: post-norm encoder."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=8192,
        hidden_size=320,
        num_hidden_layers=3,
        num_attention_heads=5,
        intermediate_size=1280,
        max_position_embeddings=256,
    )
    return BertForMaskedLM(config).train(), _labelled_tokens(batch, 128, config.vocab_size)


def llama(batch: int = 4) -> Built:
    """Llama: RMS norm, rotary positions, grouped-query attention, gated feed-forward."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train(), _labelled_tokens(batch, 128, config.vocab_size)


def t5(batch: int = 4) -> Built:
    """T5: encoder and decoder with relative positions and cross-attention."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=8192,
        d_model=256,
        d_kv=32,
        d_ff=1024,
        num_layers=2,
        num_heads=8,
        use_cache=False,
        decoder_start_token_id=0,
    )
    inputs = _labelled_tokens(batch, 128, config.vocab_size)
    return T5ForConditionalGeneration(config).train(), inputs


def vit(batch: int = 4) -> Built:
    """ViT: one patch convolution, then a pre-norm encoder over the patches."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=112,
        patch_size=8,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=1024,
        num_labels=100,
    )
    return ViTForImageClassification(config).train(), _labelled_images(
        batch, 112, 100, "pixel_values"
    )


def swin(batch: int = 6) -> Built:
    """Swin: attention within shifted windows, patches merged between stages."""
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=112,
        patch_size=4,
        embed_dim=64,
        depths=[2, 2, 2],
        num_heads=[2, 4, 8],
        window_size=7,
        num_labels=100,
    )
    return SwinForImageClassification(config).train(), _labelled_images(
        batch, 112, 100, "pixel_values"
    )


def convnext(batch: int = 6) -> Built:
    """ConvNeXt: 7x7 depthwise convolutions, channels-last feed-forward, layer scale."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        image_size=128, hidden_sizes=[48, 96, 192, 384], depths=[2, 2, 3, 2], num_labels=100
    )
    return ConvNextForImageClassification(config).train(), _labelled_images(
        batch, 128, 100, "pixel_values"
    )


def mixtral(batch: int = 4) -> Built:
    """Mixtral: a Llama-like decoder whose feed-forward is 8 experts, 2 per token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
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
    return MixtralForCausalLM(config).train(), _labelled_tokens(batch, 128, config.vocab_size)


class Labelled(nn.Module):
    """A classifier called with images and labels, that returns its cross-entropy."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(images), labels)


def _convolution(
    channels_in: int, channels_out: int, size: int, *, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    convolution = nn.Conv2d(
        channels_in, channels_out, size, stride, size // 2, groups=groups, bias=False
    )
    return [convolution, nn.BatchNorm2d(channels_out)]


class Bottleneck(nn.Module):
    """ResNet's three-convolution block; the shortcut is projected where shapes differ."""

    def __init__(self, channels_in: int, width: int, *, stride: int) -> None:
        super().__init__()
        channels_out = 4 * width
        self.branch = nn.Sequential(
            *_convolution(channels_in, width, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride=stride),
            nn.ReLU(inplace=True),
            *_convolution(width, channels_out, 1),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                *_convolution(channels_in, channels_out, 1, stride=stride)
            )

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.branch(images) + self.shortcut(images), inplace=True)


def resnet(batch: int = 8) -> Built:
    """ResNet with bottleneck blocks (2, 2, 2, 2), a ResNet-26, on 112-pixel images."""
    layers: list[nn.Module] = [
        *_convolution(3, 32, 7, stride=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = 32
    for width, stride in ((32, 1), (64, 2), (128, 2), (256, 2)):
        for block in range(2):
            layers.append(Bottleneck(channels, width, stride=stride if block == 0 else 1))
            channels = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 100)]
    return Labelled(nn.Sequential(*layers)).train(), _labelled_images(batch, 112, 100, "images")


class InvertedResidual(nn.Module):
    """MobileNetV2's block: widen, depthwise 3x3, narrow without activation."""

    def __init__(self, channels_in: int, channels_out: int, *, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = channels_in * expansion
        widen = [*_convolution(channels_in, hidden, 1), nn.ReLU6(inplace=True)]
        self.residual = stride == 1 and channels_in == channels_out
        self.branch = nn.Sequential(
            *(widen if expansion > 1 else []),
            *_convolution(hidden, hidden, 3, stride=stride, groups=hidden),
            nn.ReLU6(inplace=True),
            *_convolution(hidden, channels_out, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        narrow: Tensor = self.branch(images)
        return images + narrow if self.residual else narrow


def mobilenet(batch: int = 16) -> Built:
    """MobileNetV2 at half width on 128-pixel images: depthwise convolutions, memory-bound."""
    layers: list[nn.Module] = [*_convolution(3, 16, 3, stride=2), nn.ReLU6(inplace=True)]
    channels = 16
    for expansion, channels_out, repeats, stride in (
        (1, 8, 1, 1),
        (6, 16, 2, 2),
        (6, 16, 3, 2),
        (6, 32, 4, 2),
        (6, 48, 3, 1),
        (6, 80, 3, 2),
        (6, 160, 1, 1),
    ):
        for block in range(repeats):
            layers.append(
                InvertedResidual(
                    channels, channels_out, stride=stride if block == 0 else 1, expansion=expansion
                )
            )
            channels = channels_out
    layers += [*_convolution(channels, 640, 1), nn.ReLU6(inplace=True), nn.AdaptiveAvgPool2d(1)]
    layers += [nn.Flatten(), nn.Dropout(0.2), nn.Linear(640, 100)]
    return Labelled(nn.Sequential(*layers)).train(), _labelled_images(batch, 128, 100, "images")


class LanguageLstm(nn.Module):
    """Embedding, two LSTM layers, dropout, vocabulary logits."""

    def __init__(self, *, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.recurrent = nn.LSTM(hidden, hidden, num_layers=2, dropout=0.2, batch_first=True)
        self.dropout = nn.Dropout(0.2)
        self.logits = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embedding(tokens))
        logits: Tensor = self.logits(self.dropout(states))
        return logits


def lstm(batch: int = 16) -> Built:
    """A word-level LSTM language model over 48 steps."""
    model = LanguageLstm(vocabulary=6000, hidden=320)
    return (
        model.train(),
        _tokens(batch, 48, 6000),
        lambda logits, tokens: F.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        ),
    )


class MixerBlock(nn.Module):
    """MLP-Mixer's block: mix patches, then channels, each with its own norm and residual."""

    def __init__(self, *, patches: int, channels: int, token_hidden: int) -> None:
        super().__init__()
        self.token_norm = nn.LayerNorm(channels)
        self.tokens = nn.Sequential(
            nn.Linear(patches, token_hidden), nn.GELU(), nn.Linear(token_hidden, patches)
        )
        self.channel_norm = nn.LayerNorm(channels)
        self.channels = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)
        )

    def forward(self, patches: Tensor) -> Tensor:
        mixed = self.tokens(self.token_norm(patches).transpose(1, 2)).transpose(1, 2)
        patches = patches + mixed
        return patches + self.channels(self.channel_norm(patches))  # type: ignore[no-any-return]


class Mixer(nn.Module):
    """MLP-Mixer: patches, blocks, mean, classes."""

    def __init__(self, *, size: int, patch: int, channels: int, blocks: int, classes: int) -> None:
        super().__init__()
        patches = (size // patch) ** 2
        self.stem = nn.Conv2d(3, channels, patch, patch)
        self.blocks = nn.Sequential(
            *(
                MixerBlock(patches=patches, channels=channels, token_hidden=channels // 2)
                for _ in range(blocks)
            )
        )
        self.norm = nn.LayerNorm(channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.stem(images).flatten(2).transpose(1, 2)
        logits: Tensor = self.head(self.norm(self.blocks(patches)).mean(1))
        return logits


def mlp_mixer(batch: int = 8) -> Built:
    """MLP-Mixer with 4 blocks of 256 channels over 144 patches."""
    model = Mixer(size=96, patch=8, channels=256, blocks=4, classes=100)
    return Labelled(model).train(), _labelled_images(batch, 96, 100, "images")


class Dlrm(nn.Module):
    """DLRM: bottom MLP over dense features, embedding bags, pairwise dots, top MLP."""

    def __init__(self, *, tables: int, rows: int, width: int, dense: int) -> None:
        super().__init__()
        self.bottom = nn.Sequential(
            nn.Linear(dense, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU()
        )
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        pairs = tables * (tables + 1) // 2
        upper, lower = torch.triu_indices(tables + 1, tables + 1, 1)
        self.register_buffer("pairs", upper * (tables + 1) + lower)
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU()
        )
        self.score = nn.Linear(128, 1)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        bags = [table(categories[:, index]) for index, table in enumerate(self.tables)]
        features = torch.stack([bottom, *bags], dim=1)
        dots = torch.bmm(features, features.transpose(1, 2)).flatten(1)
        crossed = torch.cat([bottom, dots[:, self.pairs]], dim=1)
        score: Tensor = self.score(self.top(crossed))
        return score.squeeze(1)


def recommender(batch: int = 1024) -> Built:
    """DLRM with 10 tables of 40,000 rows: the update of the embeddings dominates."""
    tables, rows = 10, 40_000
    inputs = {
        "dense": torch.randn(batch, 13),
        "categories": torch.randint(0, rows, (batch, tables, 4)),
    }
    return (
        Dlrm(tables=tables, rows=rows, width=32, dense=13).train(),
        inputs,
        lambda scores, inputs: F.binary_cross_entropy_with_logits(
            scores, (inputs["dense"][:, 0] > 0).float()
        ),
    )


def _double_convolution(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        *_convolution(channels_in, channels_out, 3),
        nn.ReLU(inplace=True),
        *_convolution(channels_out, channels_out, 3),
        nn.ReLU(inplace=True),
    )


class Unet(nn.Module):
    """U-Net: contracting and expanding paths joined by concatenated skips."""

    def __init__(self, *, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            _double_convolution(channels_in, channels_out)
            for channels_in, channels_out in zip((3, *widths), widths, strict=False)
        )
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.lift = nn.ModuleList(nn.ConvTranspose2d(deep, flat, 2, 2) for deep, flat in pairs)
        self.up = nn.ModuleList(_double_convolution(2 * flat, flat) for _, flat in pairs)
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        skips = []
        for level, block in enumerate(self.down):
            images = block(images if level == 0 else F.max_pool2d(images, 2))
            skips.append(images)
        skips.pop()
        for lift, block in zip(self.lift, self.up, strict=True):
            images = block(torch.cat([skips.pop(), lift(images)], dim=1))
        logits: Tensor = self.head(images)
        return logits


def unet(batch: int = 6) -> Built:
    """U-Net with 4 levels on 80-pixel images, two classes per pixel."""
    model = Unet(widths=(24, 48, 96, 192), classes=2)
    return (
        model.train(),
        torch.randn(batch, 3, 80, 80),
        lambda logits, images: F.cross_entropy(logits, (images[:, 0] > 0).long()),
    )


class SwitchFeedForward(nn.Module):
    """Top-1 experts with a fixed capacity, dispatched by einsum (Switch Transformer)."""

    def __init__(self, *, width: int, hidden: int, experts: int, capacity_factor: float) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.expand = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.contract = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)
        self.capacity_factor = capacity_factor

    def forward(self, tokens: Tensor) -> Tensor:
        groups, length, _ = tokens.shape
        experts = self.expand.shape[0]
        capacity = int(self.capacity_factor * length / experts)
        chances = self.router(tokens).softmax(-1)
        gate, choice = chances.max(-1)
        chosen = F.one_hot(choice, experts)
        place = (chosen.cumsum(1) - 1) * chosen
        kept = chosen * (place < capacity)
        # A token beyond its expert's capacity is dropped: its row of the dispatch mask is zero.
        slot = F.one_hot(place.clamp(max=capacity - 1), capacity) * kept.unsqueeze(-1)
        dispatch = slot.to(tokens.dtype)
        routed = torch.einsum("glec,gld->egcd", dispatch, tokens).reshape(
            experts, groups * capacity, -1
        )
        answers = torch.bmm(F.relu(torch.bmm(routed, self.expand)), self.contract)
        answers = answers.reshape(experts, groups, capacity, -1)
        return torch.einsum("glec,egcd->gld", dispatch * gate[..., None, None], answers)


class SwitchBlock(nn.Module):
    """Pre-norm causal attention, then the expert feed-forward."""

    def __init__(self, *, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed = SwitchFeedForward(
            width=width, hidden=4 * width, experts=experts, capacity_factor=1.25
        )

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length, width = tokens.shape
        joint = self.query_key_value(self.attention_norm(tokens))
        query, key, value = (
            joint.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        )
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        tokens = tokens + self.project(heads.transpose(1, 2).reshape(batch, length, width))
        return tokens + self.feed(self.feed_norm(tokens))  # type: ignore[no-any-return]


class SwitchLanguageModel(nn.Module):
    """A decoder of Switch blocks; embeddings and logits share no weights."""

    def __init__(
        self, *, vocabulary: int, length: int, width: int, blocks: int, experts: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.Sequential(
            *(SwitchBlock(width=width, heads=8, experts=experts) for _ in range(blocks))
        )
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        logits: Tensor = self.logits(self.norm(self.blocks(hidden)))
        return logits


def switch_moe(batch: int = 4) -> Built:
    """Switch Transformer: 8 experts per block, top-1 routing with fixed capacity."""
    model = SwitchLanguageModel(vocabulary=4096, length=128, width=256, blocks=3, experts=8)
    return (
        model.train(),
        _tokens(batch, 128, 4096),
        lambda logits, tokens: F.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        ),
    )


ALL = [
    gpt2,
    bert,
    llama,
    t5,
    vit,
    swin,
    convnext,
    resnet,
    mobilenet,
    lstm,
    mlp_mixer,
    recommender,
    unet,
    switch_moe,
    mixtral,
]
