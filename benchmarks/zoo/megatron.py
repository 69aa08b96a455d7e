"""Build GPT as Megatron-LM and Megatron-DeepSpeed do: autograd functions, kernels of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.inputs import Built, on_meta, own_loss, random_tokens
from zoo.language import recomputed


class _Linear(torch.autograd.Function):
    """LinearWithGradAccumulationAndAsyncCommunication of megatron/core/tensor_parallel."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight)
        return F.linear(states, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        states, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        return gradient @ weight, rows.t() @ states.flatten(0, -2), rows.sum(0)


class _Region(torch.autograd.Function):
    """Where ranks begin or end to share a layer (megatron/core/tensor_parallel/mappings.py)."""

    @staticmethod
    def forward(ctx: Any, states: Tensor) -> Tensor:
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class _LayerNorm(torch.autograd.Function):
    """FusedLayerNormAffineFunction of apex."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        made = torch.native_layer_norm(states, weight.shape, weight, bias, 1e-5)
        ctx.save_for_backward(states, weight, bias, *made[1:])
        return made[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        states, weight, bias, mean, rstd = ctx.saved_tensors
        shape = weight.shape
        return torch.ops.aten.native_layer_norm_backward(
            gradient, states, shape, mean, rstd, weight, bias, [True, True, True]
        )


class _Softmax(torch.autograd.Function):
    """ScaledUpperTriangMaskedSoftmax of megatron/fused_kernels."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        made = torch.softmax(scores, -1)
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (made,) = ctx.saved_tensors
        return torch._softmax_backward_data(gradient, made, -1, made.dtype)


class _Gelu(torch.autograd.Function):
    """GeLUFunction of megatron/core/fusions/fused_bias_gelu.py; the bias is the layer's here."""

    @staticmethod
    def forward(ctx: Any, states: Tensor) -> Tensor:
        ctx.save_for_backward(states)
        return F.gelu(states, approximate="tanh")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (states,) = ctx.saved_tensors
        return torch.ops.aten.gelu_backward(gradient, states, approximate="tanh")


class Linear(nn.Linear):
    """A layer that ranks divide by its columns or, where it `ends` what they share, by its rows."""

    ends = False

    def forward(self, states: Tensor) -> Tensor:
        if not self.ends:
            states = _Region.apply(states)  # type: ignore[no-untyped-call]
        made: Tensor = _Linear.apply(states, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return _Region.apply(made) if self.ends else made  # type: ignore[no-untyped-call, no-any-return]


class RowLinear(Linear):
    ends = True


class LayerNorm(nn.LayerNorm):
    def forward(self, states: Tensor) -> Tensor:
        made: Tensor = _LayerNorm.apply(states, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return made


class MaskedSoftmax(nn.Module):
    """Scales, masks what is later and takes the softmax, in one kernel; else in torch's.

    The kernel takes halves alone (megatron/model/fused_softmax.py, is_kernel_available).
    """

    def __init__(self, *, by_kernel: bool) -> None:
        super().__init__()
        self.by_kernel = by_kernel

    def forward(self, scores: Tensor, later: Tensor) -> Tensor:
        if not self.by_kernel:
            return torch.softmax(scores.masked_fill_(later, -10000.0), -1)
        made: Tensor = _Softmax.apply(scores)  # type: ignore[no-untyped-call]
        return made


class CoreAttention(nn.Module):
    """Attention written out, between its projections."""

    def __init__(self, drop: float, *, by_kernel: bool) -> None:
        super().__init__()
        self.softmax, self.drop = MaskedSoftmax(by_kernel=by_kernel), drop

    def forward(self, query: Tensor, key: Tensor, value: Tensor, later: Tensor) -> Tensor:
        return F.dropout(self.softmax(query @ key.transpose(2, 3), later), self.drop) @ value


class Block(nn.Module):
    """Attention, whose core alone is run again with `recomputes_core`, and feed-forward."""

    def __init__(
        self, width: int, heads: int, drop: float, *, recomputes_core: bool, by_kernel: bool
    ) -> None:
        super().__init__()
        self.heads, self.drop, self.recomputes_core = heads, drop, recomputes_core
        self.core = CoreAttention(drop, by_kernel=by_kernel)
        self.norms = nn.ModuleList(LayerNorm(width) for _ in range(2))
        self.joint, self.project = Linear(width, 3 * width), RowLinear(width, width)
        self.up, self.down = Linear(width, 4 * width), RowLinear(4 * width, width)

    def forward(self, states: Tensor, later: Tensor) -> Tensor:
        batch, length, width = states.shape
        joint = self.joint(self.norms[0](states)).split(width, dim=-1)
        parts = [each.view(batch, length, self.heads, -1).transpose(1, 2) for each in joint]
        parts.append(later)
        mixed = recomputed(self.core, *parts) if self.recomputes_core else self.core(*parts)
        mixed = self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        states = states + F.dropout(mixed, self.drop)
        made = self.down(_Gelu.apply(self.up(self.norms[1](states))))  # type: ignore[no-untyped-call]
        return states + F.dropout(made, self.drop)


def _once(block: nn.Module, *arguments: Any) -> Any:
    return block(*arguments)


def _synchronize(tokens: Tensor) -> None:
    """Wait for the device, as the timers around each forward and backward pass do.

    ``torch.cuda.synchronize()`` in start() and stop() of megatron/global_vars.py, until timers got
    levels; and `broadcast_data` of megatron/mpu/data.py reads the sizes of each micro-batch.
    """
    int(torch.zeros((), dtype=torch.long, device=tokens.device))


class Gpt(nn.Module):
    """GPT and its loss over logits in fp32; it `recomputes` each "block", each "core" or "none".

    The last `kept_blocks` are not run again. A softmax is masked `by_kernel` or by torch.
    """

    def __init__(
        self, *, width: int, heads: int, layers: int, length: int, vocabulary: int,
        recomputes: str, kept_blocks: int = 0, by_kernel: bool = True, drop: float = 0.1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        core = recomputes == "core"
        self.blocks = nn.ModuleList(
            Block(width, heads, drop, recomputes_core=core, by_kernel=by_kernel)
            for _ in range(layers)
        )
        self.norm = LayerNorm(width)
        self.logits = nn.Linear(width, vocabulary, bias=False)
        self.logits.weight = self.embedding.weight
        self.run_again = layers - kept_blocks if recomputes == "block" else 0
        self.drop = drop

    def forward(self, tokens: Tensor) -> Tensor:
        _synchronize(tokens)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        states = F.dropout(self.embedding(tokens) + self.positions(places), self.drop)
        later = torch.ones(len(places), len(places), dtype=torch.bool, device=tokens.device).triu(1)
        for number, block in enumerate(self.blocks):
            run = recomputed if number < self.run_again else _once
            states = run(block, states, later)
        logits = self.logits(self.norm(states)).float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        _synchronize(tokens)
        return loss


def megatron_gpt(batch: int, **settings: Any) -> Built:
    """Megatron's GPT; `settings` are those of `Gpt`."""
    tokens = random_tokens(batch, settings["length"], settings["vocabulary"])
    return on_meta(Gpt, **settings), tokens, own_loss
