"""Check that a compiled graph has the kernels that Inductor's rules give, and the same work."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import estimator as est
from estimator.errors import GraphFileError, ModelError
from estimator.graph.compile.float8 import with_float8
from estimator.graph.compile.fusion import compile_graph
from estimator.graph.compile.parts import split_graph, with_recomputation
from estimator.graph.costs.call_costs import FusedKernel, features_of, op_cost
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.ir.ops import Op
from estimator.graph.ir.structure import value_roots
from estimator.graph.memory.step import memory_alone
from estimator.graph.trace.trace import trace_graph
from estimator.kernels.datasheet_model import chip_of
from estimator.machines.catalogue import load_profile


class Gated(nn.Module):
    """A product, then tanh(h) · sigmoid(h), whose mean is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        return torch.tanh(hidden) * torch.sigmoid(hidden)


class Residual(nn.Module):
    """Dropout, the sum with a shortcut and layer norm between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(x + F.dropout(self.first(x), 0.1)))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)
    )


class InPlace(nn.Module):
    """Writes into views and into what it read before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        self.seen.add_(hidden.detach().sum(0))
        result = torch.zeros_like(hidden)
        result[:, :2] = hidden[:, 2:]
        return self.linear(result.relu_() * self.seen)


MODELS = {
    "gated": lambda: (Gated(), torch.randn(4, 8)),
    "residual": lambda: (Residual(), torch.randn(4, 8)),
    "checkpointed": lambda: (Checkpointed(), torch.randn(4, 8)),
    "convnet": lambda: (convnet(), torch.randn(4, 3, 8, 8)),
    "in place": lambda: (InPlace(), torch.randn(4, 4)),
    "transformer": lambda: (
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
        torch.randn(4, 6, 16),
    ),
}


def pair(kind: str, **options: Any) -> tuple[OpGraph, OpGraph]:
    """The eager graph of a model and the compiled one."""
    model, batch = MODELS[kind]()
    eager = trace_graph(model, batch, **{"target": "cuda", **options})
    return eager, compile_graph(eager, "compiled")


def members(op: Op) -> set[str]:
    if not op.call.target.startswith("fused."):
        return {op.call.target.split(".")[1]}
    return {member.split(".")[1] for member in FusedKernel.of(op.call).members}


def with_member(graph: OpGraph, name: str, phase: str) -> list[Op]:
    return [op for op in graph.ops if op.phase == phase and name in members(op)]


def library_calls(graph: OpGraph) -> Counter[Any]:
    names = ("mm", "addmm", "bmm", "convolution", "attention")
    return Counter(op.call for op in graph.ops if any(name in op.call.target for name in names))


def test_a_chain_reads_each_outside_tensor_once_and_writes_only_what_others_read() -> None:
    _, compiled = pair("gated")
    product, chain = [op for op in compiled.ops if op.phase == "forward"]
    assert product.call.target == "aten.addmm.default"
    assert members(chain) == {"tanh", "sigmoid", "mul", "mean"}
    cost = op_cost(chain.call)
    # h is 4 x 8 in float32; of tanh, sigmoid, their product and its mean only the mean is kept.
    assert (cost.read_bytes, cost.written_bytes) == (4 * 8 * 4, 4)
    # 20 and 12 operations an element, a product, a sum: see cost_families.
    assert cost.flops == 4 * 8 * (20 + 12 + 1 + 1)
    features = features_of(chain.call)
    assert (features.family, features.dims) == ("reduction", (1.0, 32.0))


def test_cheap_values_are_computed_again_in_backward_instead_of_being_saved() -> None:
    eager, compiled = pair("gated")

    def saved(graph: OpGraph) -> int:
        roots = value_roots(graph)
        made = {roots[v] for op in graph.ops if op.phase == "forward" for v in op.outputs}
        read = {roots[v] for op in graph.ops if op.phase == "backward" for v in op.inputs}
        return len(made & read)

    # tanh and sigmoid of h, and the loss, whose gradient has its shape; h alone.
    assert (saved(eager), saved(compiled)) == (3, 1)
    (again,) = with_member(compiled, "tanh", "backward")
    assert {"tanh", "sigmoid", "tanh_backward", "sigmoid_backward"} <= members(again)


def test_dropout_sum_and_layer_norm_are_one_kernel_along_rows() -> None:
    _, compiled = pair("residual")
    (kernel,) = with_member(compiled, "native_layer_norm", "forward")
    assert members(kernel) == {"native_dropout", "add", "native_layer_norm"}
    features = features_of(kernel.call)
    assert (features.family, features.dims) == ("normalization", (4.0, 8.0))
    # Reads the product, x, weight and bias; writes the mask, the sum, the norm, means, deviations.
    assert features.cost.read_bytes == 4 * (32 + 32 + 8 + 8)
    assert features.cost.written_bytes == 32 + 4 * (32 + 32 + 4 + 4)


def test_batch_norm_sums_in_one_kernel_and_is_applied_with_relu_in_the_next() -> None:
    _, compiled = pair("convnet")
    sums, applied = with_member(compiled, "cudnn_batch_norm", "forward")
    assert members(applied) == {"cudnn_batch_norm", "relu"}
    assert op_cost(sums.call).read_bytes == op_cost(applied.call).written_bytes  # type: ignore[union-attr]
    # The gradient of relu is cheaper to compute in both kernels that want it than to write.
    backward = with_member(compiled, "cudnn_batch_norm_backward", "backward")
    assert [members(op) for op in backward] == [
        {"threshold_backward", "cudnn_batch_norm_backward"}
    ] * 2
    assert [len(op.outputs) for op in backward] == [2, 1]


def test_one_input_cast_for_three_products_is_cast_once() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return sum(head(x).sum() for head in self.heads)

    eager = trace_graph(Heads(), torch.randn(4, 8), target="cuda", precision="bf16-amp")
    compiled = compile_graph(eager, "compiled")

    def casts_of_x(graph: OpGraph) -> int:
        return sum(
            op.call.inputs[0].shape == (4, 8) == op.call.outputs[0].shape
            for op in with_member(graph, "_to_copy", "forward")
        )

    assert (casts_of_x(eager), casts_of_x(compiled)) == (3, 1)


@pytest.mark.parametrize("kind", MODELS)
def test_library_kernels_stay_as_they_are(kind: str) -> None:
    eager, compiled = pair(kind)
    assert library_calls(compiled) == library_calls(eager)
    assert len(compiled.ops) < sum(not op.is_view for op in eager.ops)


@pytest.mark.parametrize("kind", MODELS)
def test_every_kernel_comes_after_those_whose_results_it_reads(kind: str) -> None:
    _, compiled = pair(kind)
    there = {v for v, value in enumerate(compiled.values) if value.kind != "activation"}
    roots = value_roots(compiled)
    for op in compiled.ops:
        assert {roots[value] for value in op.inputs} <= there, op.name
        there |= {roots[value] for value in op.outputs}
    phases = [op.phase for op in compiled.ops]
    assert phases == sorted(phases, reverse=True)


@pytest.mark.parametrize("kind", MODELS)
def test_every_gradient_is_ready_after_the_kernel_that_writes_it(kind: str) -> None:
    eager, compiled = pair(kind)
    roots = value_roots(compiled)
    assert {p.name for p in compiled.parameters} == {p.name for p in eager.parameters}
    for parameter in compiled.parameters:
        written = {roots[value] for value in compiled.ops[parameter.ready_after].outputs}
        assert roots[parameter.gradient] in written
    ready = [parameter.ready_after for parameter in compiled.parameters]
    assert ready == sorted(ready)


@pytest.mark.parametrize("kind", MODELS)
def test_a_compiled_graph_at_another_batch_equals_one_compiled_there(kind: str) -> None:
    model, batch = MODELS[kind]()
    moved = compile_graph(trace_graph(model, batch, target="cuda"), "compiled").at(6)
    six = torch.cat((batch, batch[:2]))
    there = compile_graph(trace_graph(model, six, target="cuda"), "compiled").at()
    assert [call.target for call in moved.calls] == [call.target for call in there.calls]
    assert [op_cost(call) for call in moved.calls] == [op_cost(call) for call in there.calls]
    assert moved.specs == there.specs


def test_what_fused_kernels_keep_inside_takes_no_memory() -> None:
    def activations_bytes(graph: OpGraph) -> int:
        found = memory_alone(graph.at()).peaks().peak(1)
        return found.activations_bytes

    eager = trace_graph(nn.Sequential(*(Gated() for _ in range(8))), torch.randn(64, 8))
    one = 64 * 8 * 4
    # Eager training saves tanh, sigmoid and their product of each of 8 layers; compiled training
    # h and the product, which the next layer's weight wants, beside one gradient on its way.
    assert activations_bytes(eager) >= 8 * 3 * one
    assert activations_bytes(compile_graph(eager, "compiled")) <= (8 * 2 + 1) * one


@pytest.mark.parametrize(
    "change",
    [
        lambda call: call["arguments"].pop(),
        lambda call: call["arguments"].__setitem__(-2, "long"),
        lambda call: call.__setitem__("target", "fused.everything.default"),
    ],
    ids=["no members", "no number", "no family"],
)
def test_a_damaged_fused_kernel_is_refused(change: Any, tmp_path: Path) -> None:
    path = tmp_path / "compiled.graph"
    pair("gated")[1].save(path)
    data = json.loads(gzip.decompress(path.read_bytes()))
    change(next(call for call in data["calls"] if call["target"].startswith("fused.")))
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
    with pytest.raises(GraphFileError, match="is damaged"):
        OpGraph.load(path)


def test_blocks_that_are_compiled_by_themselves_share_no_kernel() -> None:
    blocks = nn.Sequential(*(Residual() for _ in range(3)))
    graph = trace_graph(blocks, torch.randn(4, 8, requires_grad=True))
    units = {
        execution: [op.module.partition(".")[0] for op in compiled.ops if op.phase == "backward"]
        for execution in ("compiled", "compiled-blocks")
        for compiled in (compile_graph(graph, execution),)  # type: ignore[arg-type]
    }
    # The gradient of a sum is fused into the kernel of the block before.
    assert len(units["compiled-blocks"]) > len(units["compiled"])
    own = [unit for unit in units["compiled-blocks"] if unit]
    assert own == sorted(own, reverse=True)


def test_what_cannot_be_compiled_is_refused() -> None:
    eager, compiled = pair("gated", target="cpu")
    with pytest.raises(ModelError, match="traced for cpu, which has no CUDA graphs"):
        compile_graph(eager, "cuda-graphs")
    with pytest.raises(ModelError, match="is no eager trace"):
        compile_graph(compiled, "compiled")
    assert compile_graph(eager, "eager") is eager


WIDTH, ROWS = 1024, 4096


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(torch.relu(self.up(x)))
        return x + down


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def traced(float8: str | None, *, width: int = WIDTH, **options: Any) -> OpGraph:
    asked: dict[str, Any] = {"precision": "bf16", "target": "cuda", "compiled": "blocks", **options}
    with torch.device("meta"):
        model = Model(width)
    return est.trace_model(model, torch.randn(ROWS, width), float8=float8, **asked)


def counted(graph: OpGraph) -> Counter[str]:
    return Counter(op.call.target.split(".")[1] for op in graph.ops)


def test_the_three_products_of_each_layer_in_a_block_change_and_the_head_does_not() -> None:
    plain, changed = counted(traced(None)), counted(traced("tensorwise"))
    # Four layers forward, each with two gradients but for the input's of the first one, which
    # nothing asks for; the head has its own forward product and two gradients.
    assert plain["mm"] == 4 + 4 + 3 + 3
    assert changed["_scaled_mm"] == 11
    assert changed["mm"] == 3


def test_a_tensorwise_factor_is_read_for_its_largest_and_then_cast() -> None:
    plain, changed = counted(traced(None)), counted(traced("tensorwise"))
    # Forward four inputs and four weights; backward the gradient of each layer, by rows and turned,
    # by columns, but for the first one's, whose input needs none; the inputs, three weights again.
    assert changed["_to_copy"] - plain["_to_copy"] == 8 + (4 + 3) + 4 + 3
    # What is the largest of a gradient is found once for both.
    assert changed["amax"] - plain["amax"] == 8 + 4 + 4 + 3


def test_layers_of_one_input_cast_it_once() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            return sum((part(x) for part in self.parts), torch.zeros_like(x))

    with torch.device("meta"):
        model = nn.Sequential(Heads(), Heads())
    options: dict[str, Any] = {"precision": "bf16", "target": "cuda", "compiled": "blocks"}
    # Three dimensions: each layer flattens its input by a view of its own.
    graph = est.trace_model(model, torch.randn(4, ROWS, WIDTH), float8="tensorwise", **options)
    casts = [op for op in graph.ops if op.phase == "forward" and "_to_copy" in op.call.target]
    assert len(casts) == 2 * (1 + 3)


def test_rows_that_lie_together_are_scaled_in_one_pass() -> None:
    rowwise = traced("rowwise")
    forward = [op for op in rowwise.ops if op.phase == "forward"]
    # Inputs are scaled by row and weights by what is a row of theirs: no pass of its own.
    assert not any("amax" in op.call.target for op in forward)
    assert any("amax" in op.call.target for op in rowwise.ops if op.phase == "backward")


def test_backward_products_of_scaled_rows_are_scaled_in_a_pass_of_their_own() -> None:
    plain, rowwise = traced(None), traced("rowwise")
    more = counted(rowwise)["mul"] - counted(plain)["mul"]
    # Four gradients of weights, three of inputs.
    assert more == 7
    assert counted(traced("tensorwise"))["mul"] == counted(plain)["mul"]
    for number, op in enumerate(rowwise.ops):
        if "_scaled_mm" not in op.call.target or op.phase == "forward":
            continue
        after = rowwise.ops[number + 1]
        assert after.inputs == op.outputs
        assert after.call.outputs == op.call.outputs


def test_products_keep_their_sizes_and_gradients_their_places() -> None:
    plain, changed = traced(None), traced("rowwise")
    assert [p.name for p in plain.parameters] == [p.name for p in changed.parameters]
    for parameter in changed.parameters:
        made = changed.ops[parameter.ready_after].outputs
        gradient = changed.values[parameter.gradient]
        assert (parameter.gradient if gradient.base is None else gradient.base) in made
    scaled = next(op for op in changed.ops if "_scaled_mm" in op.call.target)
    assert [spec.dtype for spec in scaled.call.arguments] == ["float8_e4m3fn"] * 2
    assert changed.at(2 * ROWS).calls != changed.at(ROWS).calls


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_pays_in_large_products_and_costs_more_in_small_ones(recipe: str) -> None:
    # torchao's README: 0.8 times as fast at 1024 x 2048 x 1024, 1.39 at 4096 x 8192 x 16384.
    def speedup(width: int, rows: int) -> float:
        plain, changed = (
            est.estimate(traced(each, width=width), "1x1:h100-sxm", batch_per_gpu=rows)
            for each in (None, recipe)
        )
        forward_and_backward = [
            each.breakdown.forward_s + each.breakdown.backward_s for each in (plain, changed)
        ]
        return forward_and_backward[0] / forward_and_backward[1]

    assert speedup(1024, 1024) < 1.0
    assert 1.2 < speedup(8192, 4096) < 1.7


def test_a_narrower_product_takes_less_energy() -> None:
    # 700 W over 989 and 1979 TFLOP/s: as much energy for each flop's byte of factors.
    device = load_profile("h100-sxm").devices[0]
    half, eighth = (chip_of(device, name) for name in ("bfloat16", "float8_e4m3fn"))
    assert eighth.headroom == pytest.approx(half.headroom, rel=1e-3)
    assert eighth.flops_per_s == pytest.approx(2 * half.flops_per_s, rel=1e-3)


@pytest.mark.parametrize(
    "options", [{"compiled": None}, {"precision": "fp32"}, {"target": "cpu", "compiled": True}]
)
def test_layers_that_cannot_be_float8_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="write --precision bf16 with --compile"):
        traced("rowwise", **options)


def test_unknown_recipes_and_models_without_such_layers_are_refused() -> None:
    with pytest.raises(ModelError, match="write tensorwise or rowwise"):
        traced("blockwise")
    graph = traced(None)
    apart = tuple(replace(op, module="") for op in graph.ops)
    with pytest.raises(ModelError, match="no linear layers in repeated blocks"):
        with_float8(replace(graph, ops=apart), "rowwise")


class Chain(nn.Module):
    """A matmul and some pointwise work on it, the last of it before another matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(torch.exp(self.first(x))))


class Shortcut(nn.Module):
    """Sums along a shortcut, each used beside a matmul and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.sin(layer(torch.cos(x)))
        return x


def again(graph: OpGraph) -> list[str]:
    """The forward operators that the backward pass repeats, sorted."""
    forward = {index for index, op in enumerate(graph.ops) if op.phase == "forward"}
    parts = with_recomputation(split_graph(graph))
    repeated = [part.op for part in parts if part.phase == "backward" and part.op in forward]
    return sorted(graph.ops[index].call.target.split(".")[1] for index in repeated)


def test_what_a_product_reads_is_saved_and_what_comes_before_it_is_computed_again() -> None:
    graph = trace_graph(Chain(), torch.randn(4, 8))
    # tanh's result is a factor of the second weight's gradient; exp's own gradient wants exp.
    assert again(graph) == ["exp"]


def test_sums_used_again_beyond_a_product_are_saved() -> None:
    graph = trace_graph(Shortcut(), torch.randn(4, 8, requires_grad=True))
    # Otherwise one kernel would add up the whole chain of sums from its start. The gradients of
    # cos and sin want what the forward pass made them of, which is saved as it is.
    assert again(graph) == []


def test_random_numbers_are_never_drawn_again() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 8))
    graph = trace_graph(model, torch.randn(4, 8), target="cuda")
    assert again(graph) == []
