"""Megatron's kernels for a step: what is cast, when, and what is saved, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import estimator as est
from estimator import OpGraph, trace_model
from estimator.api import with_recipe
from estimator.errors import ModelError, StrategyError
from estimator.graph.costs.matmuls import attention_arguments
from estimator.graph.ir.collectives import collectives_of
from estimator.graph.ir.ops import Op
from estimator.graph.ir.structure import GraphStructure
from estimator.graph.memory.sizes import optimizer_memory
from estimator.graph.memory.step import memory_alone
from estimator.graph.partition.layout import split_by_layout
from estimator.graph.partition.stages import held_between_passes
from estimator.kernels.roofline import Roofline
from estimator.machines.catalogue import load_profile
from estimator.tensors import OpCall, TensorSpec
from estimator.workload.layouts import Layout
from estimator.workload.recipe import Recipe

TOKENS, WIDTH, INNER = 2 * 256, 128, 256


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = (
            nn.Linear(WIDTH, INNER, bias=False),
            nn.Linear(INNER, WIDTH, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Block(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 64)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return super().forward(x + mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def traced(recipe: str) -> OpGraph:
    batch = torch.randn(2, 256, WIDTH)
    return trace_model(Model(), batch, target="cuda", precision="bf16", recipe=recipe)


def of_block(graph: OpGraph, phase: str, target: str) -> list[Op]:
    return [
        op
        for op in graph.ops
        if op.phase == phase and op.module.startswith("layers.1") and target in op.call.target
    ]


def test_a_tensor_is_cast_once_for_both_of_its_products() -> None:
    graph = traced("megatron:fp8=current")
    forward, backward = (
        of_block(graph, "forward", "quantize"),
        of_block(graph, "backward", "quantize"),
    )
    # The input of each of two products, the gradient of each result; no weight.
    assert len(forward) == len(backward) == 2
    assert len(of_block(graph, "backward", "_scaled_mm")) == 4
    by_columns = {op.outputs[1] for op in forward}
    read = {value for op in of_block(graph, "backward", "_scaled_mm") for value in op.inputs}
    assert by_columns <= read
    # What was cast is not held beside.
    assert not {value for op in forward for value in op.inputs} & read


def test_what_an_activation_writes_is_read_again_to_cast_it() -> None:
    casts = of_block(traced("megatron:fp8=mxfp8"), "forward", "quantize")
    read = [sum(spec.nbytes for spec in op.call.inputs) for op in casts]
    # The norm's result and the activation's in bf16: a kernel of torch's compiler knows no FP8.
    assert sorted(read) == [2 * TOKENS * WIDTH, 2 * TOKENS * INNER]


# Scaled by its own largest, what a norm gives knows it; an activation and two gradients do not.
@pytest.mark.parametrize(
    ("scaling", "passes"), [("delayed", 0), ("mxfp8", 0), ("current", 3), ("nvfp4", 4)]
)
def test_the_largest_of_a_tensor_is_looked_for_where_the_scale_needs_it(
    scaling: str, passes: int
) -> None:
    graph = traced(f"megatron:fp8={scaling}")
    phases = ("forward", "backward")
    assert sum(len(of_block(graph, phase, "amax")) for phase in phases) == passes


def test_attention_goes_at_cudnns_published_rate() -> None:
    graph = traced("megatron")
    (attention,) = of_block(graph, "forward", "attention")
    assert attention.call.target.startswith("te.")
    heads, tokens, width = 64, 8192, 128
    call = _attention_call(attention, (1, heads, tokens, width))
    # 644 TFLOP/s on an H200 at 8,192 tokens, causal counted half.
    expected = 4 * heads * width * tokens * (tokens + 1) / 2 / 644e12
    found = Roofline(load_profile("h200")).predict(call)
    assert found.cold_s == pytest.approx(expected, rel=0.02)


class Windowed(nn.Module):
    """Attention of 256 tokens, each to its window of 64, as models of transformers are traced."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        heads = self.embedding(tokens).unflatten(-1, (2, 64)).transpose(1, 2)
        cut = heads.unflatten(2, (-1, 64)).transpose(1, 2).flatten(0, 1)
        return F.scaled_dot_product_attention(cut, cut, cut).float().square().mean()


# Milliseconds of two samples' gradients in MXFP8: 128 heads of 64, a window of 128 tokens, cuDNN
# 9.24 (NVIDIA/cudnn-frontend, benchmark/sdpa_benchmark_training/results/gpt_oss, 2026-06-15).
@pytest.mark.parametrize(
    ("machine", "tokens", "published_ms"),
    [
        *(("gb200-nvl72", 4096, 2.061), ("gb200-nvl72", 8192, 7.331)),
        *(("gb300-nvl72", 4096, 1.874), ("gb300-nvl72", 8192, 6.643)),
    ],
)
def test_gradients_of_windows_in_fp8_take_as_long_as_those_of_all_tokens_before(
    machine: str, tokens: int, published_ms: float
) -> None:
    batch = torch.randint(64, (2, 256))
    recipe = "megatron:fp8=mxfp8,fp8-attention"
    graph = trace_model(Windowed(), batch, target="cuda", precision="bf16", recipe=recipe)
    (attention,) = (op for op in graph.ops if "attention_backward" in op.call.target)
    assert [dict(call.keywords)["windows"] for call in attention.calls] == [4, 4]
    call = _attention_call(attention, (2 * tokens // 128, 128, 128, 64))
    rest = [(name, value) for name, value in call.keywords if name != "windows"]
    call = replace(call, keywords=(*rest, ("windows", tokens // 128)))
    found = Roofline(load_profile(machine)).predict(call)
    assert found.cold_s == pytest.approx(published_ms / 1e3, rel=0.08)


def _attention_call(op: Op, shape: tuple[int, ...]) -> OpCall:
    start, _, _ = attention_arguments(op.call)
    spec = TensorSpec(shape, "bfloat16")
    arguments = list(op.call.arguments)
    arguments[start : start + 3] = [spec] * 3
    return replace(op.call, arguments=tuple(arguments), outputs=(spec, *op.call.outputs[1:]))


def test_a_recipe_reads_back_and_refuses_what_is_none() -> None:
    text = "megatron:fp8=mxfp8,fp8-attention,graphs=iteration"
    assert str(Recipe.parse(text)) == text
    text = "megatron:recompute=layernorm+moe_act,recompute-layers=5,offload-layers=20"
    assert str(Recipe.parse(text)) == text
    for wrong in (
        *("deepspeed", "megatron:fp8=int4", "megatron:graphs", "megatron:x=1"),
        *("megatron:recompute=norms", "megatron:offload-layers=all", "megatron:recompute"),
    ):
        with pytest.raises(StrategyError):
            Recipe.parse(wrong)


def saved(graph: OpGraph) -> int:
    """Bytes that the forward pass leaves to the backward pass."""
    structure = GraphStructure.of(graph)
    return held_between_passes(graph.at(), structure)


def test_what_norms_give_is_made_again_from_what_they_read() -> None:
    plain, less = (traced(f"megatron{text}") for text in ("", ":recompute=layernorm"))
    # The input of the first product of three blocks, in bf16, and a root of a mean of each row.
    assert saved(plain) - saved(less) == 3 * (2 * TOKENS * WIDTH + 4 * TOKENS)
    layers = traced("megatron:recompute-layers=2")
    again = {op.module.split(".")[1] for op in layers.ops if op.is_repeated and "mm" in op.name}
    assert again == {"0", "1"}


def test_what_a_block_saves_waits_on_the_host_until_the_one_behind_has_its_gradients() -> None:
    plain, moved = (traced(f"megatron{text}") for text in ("", ":offload-layers=2"))
    peak = memory_alone(plain.at()).peaks().activations_bytes
    # Of three blocks one stays, and the next one is there before that is done.
    assert saved(moved) < saved(plain) / 2
    assert memory_alone(moved.at()).peaks().activations_bytes < peak
    reloads = [op for op in moved.ops if "reload" in op.call.target]
    assert [op.module.split(".")[1] for op in reloads] == ["2", "1"]
    assert any("2 layers save" in said for said in moved.assumptions)


def test_a_recipe_is_of_bf16_models_on_gpus_and_goes_on_eager_graphs_later() -> None:
    batch = torch.randn(2, 256, WIDTH)
    with pytest.raises(ModelError, match="bf16"):
        trace_model(Model(), batch, target="cuda", recipe="megatron")
    eager = trace_model(Model(), batch, target="cuda", precision="bf16")
    assert with_recipe(eager, recipe="megatron").ops == traced("megatron").ops


def test_a_precision_aware_optimizer_keeps_half_and_casts_no_gradients() -> None:
    plain, aware = (
        optimizer_memory(traced(recipe), master_ratio=2)
        for recipe in ("megatron", "megatron:precision-aware-optimizer")
    )
    # Of a weight 4 + 4 + 4 bytes, or 2 + 2 + 2; a norm's block of 512 bytes is twice as large in
    # fp32.
    weights = 3 * 2 * WIDTH * INNER
    assert plain.state_bytes == 12 * weights + 3 * 3 * 1024
    assert aware.state_bytes == 6 * weights + 3 * (2 * 2 * WIDTH + 512)
    # Gradients are cast to fp32 for the update.
    assert plain.together_bytes - aware.together_bytes == 4 * weights + 3 * 1024


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(512, WIDTH)
        self.layers = nn.ModuleList(Mlp() for _ in range(3))
        self.head = nn.Linear(WIDTH, 512, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten())


PART, WHOLE = TOKENS // 2 * WIDTH, TOKENS * WIDTH
# Of an activation, or its gradient: each of two ranks has half of its columns.
INSIDE = TOKENS * INNER // 2


@pytest.mark.parametrize(
    ("scaling", "gathers", "read", "largest"),
    [
        # What is kept of the forward pass is gathered again; it and the gradient are then turned.
        ("current", [1, 2], [[2 * PART, 2 * INSIDE], [2 * PART, WHOLE, WHOLE, 2 * INSIDE]], [1, 2]),
        # By columns it is cast with the rows, and of the gradient both are gathered.
        ("mxfp8", [1, 3], [[2 * PART, 2 * INSIDE], [2 * PART, 2 * INSIDE]], [0, 0]),
    ],
)
def test_of_divided_tokens_each_rank_casts_its_own_before_they_are_gathered(
    scaling: str, gathers: list[int], read: list[list[int]], largest: list[int]
) -> None:
    graph = trace_model(
        Language(),
        torch.zeros(2, 256, dtype=torch.long),
        target="cuda",
        precision="bf16",
        recipe=f"megatron:fp8={scaling}",
    )
    local = split_by_layout(graph, Layout.parse("tp=2,sp,megatron,dp=1"))
    exchanged = collectives_of(local.at())
    for phase, count, sizes, passes in zip(
        ("forward", "backward"), gathers, read, largest, strict=True
    ):
        own = [c for c in exchanged if c.module.startswith("layers.1") and c.phase == phase]
        assert [c.size_bytes for c in own if c.op == "all_gather"] == [WHOLE] * count
        casts = of_block(local, phase, "quantize")
        found = [sum(spec.nbytes for spec in op.call.inputs) for op in casts]
        assert sorted(found) == sorted(sizes)
        assert len(of_block(local, phase, "amax")) == passes
        # All ranks scale their parts by the largest of all.
        numbers = [c for c in own if c.op == "all_reduce" and c.size_bytes == 4]
        assert len(numbers) == (scaling == "current")


SAID: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"precision": "bf16-amp"}, {"precision": "bf16-amp"}),
    ({"optimizer": "sgd", "clip": 1.0}, {"optimizer": "sgd", "clip_grad_norm": True}),
    (
        {"precision": "fp16-amp", "grad_scaler": True},
        {"precision": "fp16-amp", "grad_scaler": True},
    ),
    ({"checkpointing": "full"}, {"checkpoint": "full"}),
    ({"compile": True}, {"compiled": True}),
    (
        {"precision": "bf16", "compile": "blocks", "float8": "rowwise"},
        {"precision": "bf16", "compiled": "blocks", "float8": "rowwise"},
    ),
    (
        {"precision": "bf16", "framework": "megatron", "fp8": "current"},
        {"precision": "bf16", "recipe": "megatron:fp8=current"},
    ),
]


def recipe_traced(**options: Any) -> est.OpGraph:
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)]
    return est.trace_model(
        nn.Sequential(*blocks), torch.randn(16, 32), target="cuda", name="m", **options
    )


@pytest.mark.parametrize(("recipe", "keywords"), SAID, ids=str)
def test_a_recipe_traces_what_its_keywords_do(
    recipe: dict[str, Any], keywords: dict[str, Any]
) -> None:
    assert recipe_traced(recipe=est.Recipe(**recipe)) == recipe_traced(**keywords)


def test_what_a_recipe_leaves_open_stands_beside_it_and_what_it_says_does_not() -> None:
    recipe = est.Recipe(precision="bf16-amp")
    assert recipe_traced(recipe=recipe, optimizer="sgd").optimizer == "sgd"
    assert recipe_traced(recipe=recipe, precision="bf16-amp").precision == "bf16-amp"
    with pytest.raises(est.EstimatorError, match="the recipe says precision 'bf16-amp'"):
        recipe_traced(recipe=recipe, precision="fp16-amp")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"precision": "fp7"}, "precision 'fp7' is unknown"),
        ({"compile": "fast"}, "compile 'fast' is unknown; choose one of cuda-graphs, blocks"),
        ({"float8": "all"}, "float8 'all' is unknown"),
        ({"fp8": "current"}, "fp8 is a switch of a framework"),
    ],
)
def test_a_wrong_recipe_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(est.EstimatorError, match=says):
        est.Recipe(**wrong)
