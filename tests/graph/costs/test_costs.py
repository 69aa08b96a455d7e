"""Costs of operators, against torch's own flop counter and against bytes counted by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import estimator as est
from estimator.api import estimate
from estimator.estimates.table import estimate_many
from estimator.graph.compile.fusion import compile_graph
from estimator.graph.costs.call_costs import family_of, features_of, op_cost, step_flops
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.ir.ops import OpCost
from estimator.graph.trace.trace import trace_graph
from estimator.tensors import OpCall, TensorSpec

FLOAT_BYTES, INDEX_BYTES = 4, 8


def spec(*shape: int, dtype: str = "float32", strides: tuple[int, ...] | None = None) -> TensorSpec:
    return TensorSpec(shape, dtype, strides)


def describe(leaf: object) -> object:
    if isinstance(leaf, Tensor):
        strides = None if leaf.is_contiguous() else tuple(leaf.stride())
        return TensorSpec(tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."), strides)
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else str(leaf)


def as_tuples(tree: object) -> object:
    return tuple(map(as_tuples, tree)) if isinstance(tree, (list, tuple)) else tree


class Calls(TorchDispatchMode):
    """Every operator call below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OpCall] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        described = as_tuples(tree_map(describe, args))
        keywords = tuple((k, as_tuples(tree_map(describe, v))) for k, v in (kwargs or {}).items())
        result = func(*args, **(kwargs or {}))
        outputs = tuple(describe(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        self.calls.append(OpCall(str(func), described, keywords, outputs))
        return result


def calls_of(step: Callable[[], Tensor]) -> list[OpCall]:
    with Calls() as recorded:
        step().sum().backward()
    return recorded.calls


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(lambda: leaf(3, 5) @ leaf(5, 7), id="mm"),
        pytest.param(lambda: torch.bmm(leaf(2, 3, 5), leaf(2, 5, 7)), id="bmm"),
        pytest.param(lambda: F.linear(leaf(6, 5), leaf(7, 5), leaf(7)), id="addmm"),
        pytest.param(
            lambda: torch.baddbmm(leaf(2, 3, 7), leaf(2, 3, 5), leaf(2, 5, 7)), id="baddbmm"
        ),
        pytest.param(
            lambda: F.conv2d(leaf(2, 3, 9, 9), leaf(4, 3, 3, 3), leaf(4), stride=2, padding=1),
            id="convolution",
        ),
        pytest.param(
            lambda: F.conv_transpose2d(leaf(2, 3, 5, 5), leaf(3, 4, 2, 2), stride=2),
            id="transposed convolution",
        ),
        pytest.param(lambda: F.conv1d(torch.randn(2, 3, 9), leaf(4, 3, 3)), id="weight alone"),
    ],
)
def test_flops_forward_and_backward_agree_with_torchs_counter(step: Callable[[], Tensor]) -> None:
    with FlopCounterMode(display=False) as counter:
        step().sum().backward()
    costs = [op_cost(call) for call in calls_of(step) if family_of(call.target) in KERNELS]
    assert sum(cost.flops for cost in costs if cost) == counter.get_total_flops() > 0


KERNELS = ("matmul", "convolution", "attention")


def test_attention_counts_two_products_forward_and_five_backward() -> None:
    query, key, value = leaf(2, 3, 6, 8), leaf(2, 3, 10, 8), leaf(2, 3, 10, 8)
    calls = calls_of(lambda: F.scaled_dot_product_attention(query, key, value))
    shapes = [tuple(tensor.shape) for tensor in (query, query, key, value)]
    forward, backward = [call for call in calls if family_of(call.target) == "attention"]
    assert op_cost(forward).flops == sdpa_flop_count(*shapes[1:])
    assert op_cost(backward).flops == sdpa_backward_flop_count(*shapes)
    assert features_of(backward).dims == (6, 6, 10, 8, 0)


@pytest.mark.parametrize(
    ("queries", "visible"),
    [(4, 1 + 2 + 3 + 4), (6, 1 + 2 + 3 + 4 + 4 + 4)],
    ids=["square", "beyond"],
)
def test_causal_attention_counts_only_the_keys_a_query_may_see(queries: int, visible: int) -> None:
    query, key = spec(1, 1, queries, 8), spec(1, 1, 4, 8)
    call = OpCall(
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        (query, key, key, 0.0, True),
        (),
        (query,),
    )
    assert op_cost(call).flops == 2 * visible * 8 * 2
    assert features_of(call).dims[4] == 1


def test_a_fourier_transform_takes_five_n_log_n() -> None:
    signal = spec(3, 8, dtype="complex64")
    call = OpCall("aten._fft_c2c.default", (signal, (1,), 0, True), (), (signal,))
    # Three transforms of 8 points: log2 8 = 3.
    assert op_cost(call).flops == 3 * 5 * 8 * 3
    # Three rows of 8 real numbers to 5 complex ones, and back: half the work.
    real, half = spec(3, 8), spec(3, 5, dtype="complex64")
    there = OpCall("aten._fft_r2c.default", (real, (1,), 0, True), (), (half,))
    back = OpCall("aten._fft_c2r.default", (half, (1,), 0, 8), (), (real,))
    for call in (there, back):
        assert op_cost(call) == OpCost(3 * 2.5 * 8 * 3, *_sizes(call))
        features = features_of(call)
        assert (features.family, features.dims) == ("fourier", (3.0, 8.0))


def _sizes(call: OpCall) -> tuple[float, float]:
    return float(call.inputs[0].nbytes), float(call.outputs[0].nbytes)


def test_index_tensors_choose_as_many_rows_as_they_broadcast_to() -> None:
    rows, columns = spec(3, 1, dtype="int64"), spec(1, 5, dtype="int64")
    call = OpCall("aten.index.Tensor", (spec(7, 9, 2), (rows, columns)), (), (spec(3, 5, 2),))
    # 15 places of two numbers each.
    assert features_of(call).dims == (15.0, 2.0)


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("_scaled_dot_product_flash_attention", 5),
        ("_scaled_dot_product_efficient_attention", 6),
        ("_scaled_dot_product_cudnn_attention", 6),
        ("_scaled_dot_product_flash_attention_backward", 12),
        ("_scaled_dot_product_efficient_attention_backward", 12),
        ("_scaled_dot_product_cudnn_attention_backward", 15),
    ],
)
def test_is_causal_stands_where_torchs_schema_has_it(name: str, before: int) -> None:
    schema = getattr(torch.ops.aten, name).default._schema
    position = [item.name for item in schema.arguments].index("is_causal")
    q = spec(1, 2, 4, 8)
    for causal in (False, True):
        values = [q if str(item.type) == "Tensor" else 0 for item in schema.arguments]
        values[position] = causal
        call = OpCall(f"aten.{name}.default", tuple(values), (), (q,))
        assert features_of(call).dims == (2, 4, 4, 8, float(causal))


def test_a_grouped_convolution_divides_the_work_by_its_groups() -> None:
    image, weight = spec(2, 8, 6, 6), spec(8, 1, 3, 3)
    arguments = (image, weight, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 8)
    call = OpCall("aten.convolution.default", arguments, (), (image,))
    assert op_cost(call).flops == 2 * (2 * 8 * 36) * 9
    assert features_of(call).dims == (2, 1, 1, 8, 36, 9, 36, 1)


def test_convolution_backward_costs_what_its_output_mask_asks() -> None:
    image, weight, gradient = spec(2, 3, 8, 8), spec(5, 3, 3, 3), spec(2, 5, 8, 8)
    one_gradient_flops = 2 * gradient.numel * 3 * 9

    def cost(mask: tuple[bool, bool, bool], outputs: tuple[TensorSpec, ...]) -> OpCost:
        rest = (None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1, mask)
        call = OpCall(
            "aten.convolution_backward.default", (gradient, image, weight, *rest), (), outputs
        )
        return op_cost(call)

    both = cost((True, True, False), (image, weight))
    assert both.flops == 2 * one_gradient_flops
    weight_alone = cost((False, True, False), (weight,))
    assert weight_alone.flops == one_gradient_flops
    assert weight_alone.read_bytes == FLOAT_BYTES * (gradient.numel + image.numel)


def test_a_recurrent_layer_multiplies_every_weight_once_a_step_and_sample() -> None:
    steps, batch, size, hidden = 7, 3, 5, 4
    torch.manual_seed(0)
    layer = torch.nn.LSTM(size, hidden)
    calls = calls_of(lambda: layer(torch.randn(steps, batch, size))[0])
    forward, backward = [call for call in calls if family_of(call.target) == "recurrent"]
    weights = 4 * hidden * (size + hidden)
    assert op_cost(forward).flops == 2 * steps * batch * weights
    assert op_cost(backward).flops == 2 * op_cost(forward).flops
    gates = 4 * hidden
    assert features_of(forward).dims == (steps * batch, weights, 1, 1, gates, hidden, steps)


@pytest.mark.parametrize(("bidirectional", "chains", "at_once"), [(False, 1, 3), (True, 3, 2)])
def test_directions_run_side_by_side_and_layers_of_one_direction_as_a_wavefront(
    bidirectional: bool, chains: int, at_once: int
) -> None:
    torch.manual_seed(0)
    layers = torch.nn.GRU(5, 4, num_layers=3, bidirectional=bidirectional)
    graph = est.trace_model(
        layers,
        torch.randn(7, 2, 5),
        loss=lambda out, _: out[0].sum(),
        target="cuda",
        precision="fp32",
    )
    found = [op.call for op in graph.ops if family_of(op.call.target) == "recurrent"]
    assert len(found) == 2
    for call in found:
        assert features_of(call).dims[2:] == (chains, at_once, 3 * 4, 4, 7)


def test_a_grouped_product_shares_its_tokens_among_the_groups() -> None:
    tokens, inner, columns, groups = 64, 16, 32, 4
    offsets = spec(groups, dtype="int32")
    left, right = spec(tokens, inner), spec(groups, inner, columns)
    forward = OpCall(
        "aten._grouped_mm.default", (left, right, offsets), (), (spec(tokens, columns),)
    )
    assert op_cost(forward).flops == 2 * tokens * inner * columns
    assert features_of(forward).dims == (groups, tokens / groups, columns, inner)
    turned, gradient = spec(inner, tokens, strides=(1, inner)), spec(tokens, columns)
    weight = OpCall("aten._grouped_mm.default", (turned, gradient, offsets), (), (right,))
    assert op_cost(weight).flops == 2 * tokens * inner * columns


def test_an_expanded_input_is_read_once() -> None:
    big, expanded = spec(64, 128), spec(64, 128, strides=(0, 1))
    call = OpCall("aten.add.Tensor", (big, expanded), (), (big,))
    cost = op_cost(call)
    assert cost.read_bytes == FLOAT_BYTES * (64 * 128 + 128)
    assert cost.written_bytes == FLOAT_BYTES * 64 * 128


def test_embedding_reads_the_rows_it_looks_up_and_its_gradient_writes_the_whole_table() -> None:
    table, indices, found = spec(50_000, 16), spec(4, 10, dtype="int64"), spec(4, 10, 16)
    rows_bytes, index_bytes = FLOAT_BYTES * 40 * 16, INDEX_BYTES * 40
    forward = OpCall("aten.embedding.default", (table, indices), (), (found,))
    assert op_cost(forward) == OpCost(0.0, rows_bytes + index_bytes, rows_bytes)
    assert features_of(forward).dims == (40, 16)
    arguments = (found, indices, 50_000, -1, False)
    backward = OpCall("aten.embedding_dense_backward.default", arguments, (), (table,))
    cost = op_cost(backward)
    assert cost.written_bytes == table.nbytes + rows_bytes
    assert cost.read_bytes == rows_bytes + index_bytes + rows_bytes


def test_scatter_in_place_touches_only_what_has_an_index() -> None:
    table, index, source = spec(1000, 8), spec(10, 8, dtype="int64"), spec(10, 8)
    arguments = (table, 0, index, source)
    in_place = op_cost(OpCall("aten.scatter_add_.default", arguments, (), (table,)))
    fresh = op_cost(OpCall("aten.scatter_add.default", arguments, (), (table,)))
    assert in_place.written_bytes == source.nbytes
    assert in_place.read_bytes == index.nbytes + 2 * source.nbytes
    assert fresh == in_place + OpCost(0.0, table.nbytes, table.nbytes)


def test_nll_loss_reads_one_score_per_target() -> None:
    scores, targets, loss = spec(32, 1000), spec(32, dtype="int64"), spec()
    call = OpCall(
        "aten.nll_loss_forward.default", (scores, targets, None, 1, -100), (), (loss, loss)
    )
    assert op_cost(call).read_bytes == 32 * (FLOAT_BYTES + INDEX_BYTES)
    assert features_of(call).dims == (32, 1000)


def test_a_copy_into_a_tensor_does_not_read_it() -> None:
    into, source = spec(8, 8), spec(8, 8, dtype="bfloat16")
    call = OpCall("aten.copy_.default", (into, source), (), (into,))
    assert op_cost(call) == OpCost(0.0, 2 * 64, 4 * 64)


def test_a_masked_fill_is_a_copy_and_then_filled_in_place() -> None:
    scores, mask = torch.randn(8, 8), torch.ones(8, 8, dtype=torch.bool)
    with Calls() as recorded:
        scores.masked_fill(mask, 0.0)
        scores.masked_fill_(mask, 0.0)
    filled, in_place = map(op_cost, recorded.calls)
    assert in_place.moved_bytes == 256 + 64 + 256
    assert filled.moved_bytes == 256 + 256 + in_place.moved_bytes


def test_views_are_free_and_fresh_memory_is_not_touched() -> None:
    big = spec(64, 64)
    assert op_cost(OpCall("aten.t.default", (big,), (), (big,))) == OpCost()
    assert family_of("aten.transpose.int") == "view"
    assert op_cost(OpCall("aten.empty_like.default", (big,), (), (big,))) == OpCost()


def test_an_operator_without_a_formula_has_no_cost_rather_than_none_at_all() -> None:
    call = OpCall("mylib.strange_op.default", (spec(4),), (), (spec(4),))
    assert op_cost(call) is None
    assert features_of(call) is None
    assert family_of(call.target) == "other"


def test_matmul_layout_tells_which_factor_is_stored_by_columns() -> None:
    by_rows, by_columns = spec(8, 8), spec(8, 8, strides=(1, 8))
    found = {
        (a.strides is None, b.strides is None): features_of(
            OpCall("aten.mm.default", (a, b), (), (by_rows,))
        ).layout
        for a in (by_rows, by_columns)
        for b in (by_rows, by_columns)
    }
    expected = {(True, True): "nn", (True, False): "nt", (False, True): "tn", (False, False): "tt"}
    assert found == expected


@pytest.mark.parametrize(
    ("target", "arguments", "output", "rows", "row_length"),
    [
        ("aten._softmax.default", (spec(4, 6, 8), -1, False), spec(4, 6, 8), 24, 8),
        ("aten._softmax.default", (spec(4, 6, 8), 1, False), spec(4, 6, 8), 32, 6),
        ("aten.sum.dim_IntList", (spec(4, 6, 8), (0, 1)), spec(8), 8, 24),
        ("aten.native_layer_norm.default", (spec(4, 6, 8), (8,)), spec(4, 6, 8), 24, 8),
        ("aten.native_batch_norm.default", (spec(4, 6, 5, 5),), spec(4, 6, 5, 5), 6, 100),
        (
            "aten.native_group_norm.default",
            (spec(4, 6, 5, 5), None, None, 4, 6, 25, 2, 1e-5),
            spec(4, 6, 5, 5),
            8,
            75,
        ),
        ("aten.relu.default", (spec(4, 6),), spec(4, 6), 1, 24),
    ],
)
def test_a_row_is_what_one_sum_is_taken_over(
    target: str, arguments: tuple[object, ...], output: TensorSpec, rows: int, row_length: int
) -> None:
    assert features_of(OpCall(target, arguments, (), (output,))).dims == (rows, row_length)


@pytest.mark.parametrize(
    ("other", "run"),
    [
        pytest.param(spec(4, 6, 8), 4 * 6 * 8, id="same layout"),
        pytest.param(spec(8), 8, id="bias broadcast over rows"),
        pytest.param(spec(4, 1, 1), 6 * 8, id="one number per row"),
        pytest.param(spec(4, 6, 8, strides=(48, 1, 6)), 1, id="transposed"),
        pytest.param(spec(4, 6, 8, strides=(96, 16, 1)), 8, id="half of wider rows"),
    ],
)
def test_innermost_run_is_what_all_tensors_have_side_by_side(other: TensorSpec, run: int) -> None:
    big = spec(4, 6, 8)
    features = features_of(OpCall("aten.add.Tensor", (big, other), (), (big,)))
    assert features.innermost_run == run
    assert (features.layout == "contiguous") == (run == big.numel)


def test_tensors_permuted_alike_are_contiguous() -> None:
    channels_last = spec(2, 3, 4, 4, strides=(48, 1, 12, 3))
    call = OpCall("aten.mul.Tensor", (channels_last, channels_last), (), (channels_last,))
    assert features_of(call).innermost_run == math.prod(channels_last.shape)


def convolutional_step() -> Tensor:
    norm, image = torch.nn.BatchNorm2d(8), torch.randn(2, 3, 16, 16)
    hidden = F.hardswish(norm(F.conv2d(image, leaf(8, 3, 3, 3), padding=1)))
    hidden = F.max_pool2d(F.dropout2d(F.group_norm(hidden, 2), 0.1), 2)
    hidden = torch.cat((F.interpolate(hidden, scale_factor=2.0, mode="bilinear"), image), 1)
    pooled = F.adaptive_avg_pool2d(F.pad(hidden, (1, 1)), 1)
    return F.smooth_l1_loss(pooled, torch.zeros_like(pooled))


def transformer_step() -> Tensor:
    tokens, table = torch.randint(0, 30, (2, 6)), leaf(30, 16)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True)
    hidden = F.rms_norm(layer(F.embedding(tokens, table)).roll(1, 1), (16,))
    routed, chosen = (hidden @ leaf(16, 4)).softmax(-1).topk(2, dim=-1)
    mixed = torch.zeros_like(hidden).scatter_add(2, chosen, routed)
    mixed = mixed.masked_scatter(tokens.unsqueeze(-1) < 3, leaf(12, 16))
    return F.cross_entropy((mixed @ table.t()).flatten(0, 1), tokens.flatten())


def recommender_step() -> Tensor:
    indices, table = torch.randint(0, 50, (4, 5)), leaf(50, 8)
    bags = torch.stack((F.embedding_bag(indices, table), table[indices[:, 0]]), 1)
    crossed = torch.bmm(bags, bags.transpose(1, 2)).tril().flatten(1)
    return F.binary_cross_entropy_with_logits(crossed.sum(1), torch.ones(4))


@pytest.mark.parametrize("step", [convolutional_step, transformer_step, recommender_step])
def test_every_operator_of_common_training_steps_has_a_formula(step: Callable[[], Tensor]) -> None:
    calls = calls_of(step)
    assert {call.target for call in calls if features_of(call) is None} == set()
    assert len(calls) > 20


def test_a_pooling_window_larger_than_its_input_ends_where_the_input_does() -> None:
    image, pooled = TensorSpec((2, 3, 7, 5)), TensorSpec((2, 3, 1, 1))
    call = OpCall("aten.avg_pool2d.default", (image, (1280, 1280)), outputs=(pooled,))
    cost = op_cost(call)
    assert cost.flops == 2 * 3 * 7 * 5


def test_a_power_of_one_is_a_copy() -> None:
    line = TensorSpec((10,))
    costs = [
        op_cost(OpCall("aten.pow.Tensor_Scalar", (line, exponent), outputs=(line,)))
        for exponent in (1, 1.0, 2)
    ]
    assert [cost.flops for cost in costs if cost is not None] == [10, 10, 20]


def test_a_linear_layer_of_mkldnn_multiplies_by_the_transpose_of_its_weight() -> None:
    # 2 · 3 rows of 5 numbers become rows of 7: 2 · 6 · 5 · 7 FLOPs; the weight is (7, 5).
    rows, weight, out = spec(2, 3, 5), spec(7, 5), spec(2, 3, 7)
    call = OpCall("aten.mkldnn_linear.default", (rows, weight, None), (), (out,))
    assert op_cost(call).flops == 2 * 6 * 5 * 7
    assert features_of(call).dims == (1.0, 6.0, 7.0, 5.0)
    # Backward computes as much for the gradient of each of its factors.
    back = OpCall(
        "aten.mkldnn_linear_backward.default",
        (rows, out, weight, (True, True, False)),
        (),
        (rows, weight),
    )
    assert op_cost(back).flops == 2 * 2 * 6 * 5 * 7


class Blocks(nn.Module):
    """A matmul by 16 x 16, then blocks of two by 16 x 64, perhaps behind checkpoints."""

    def __init__(self, use_reentrant: bool | None, width: int = 16, *, blocks: int = 3) -> None:
        super().__init__()
        self.use_reentrant, self.first = use_reentrant, nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
            )
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.use_reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


# Of 32 samples by 16 x 64 numbers, a multiply-add as 2.
PRODUCT = 2 * 32 * 16 * 64


def blocks(use_reentrant: bool | None, target: Any = "cpu") -> OpGraph:
    return trace_graph(Blocks(use_reentrant), torch.randn(32, 16), target=target)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("use_reentrant", "again"),
    # Without reentrance a block stops once all that was saved is there: before its last matmul.
    [(None, 0), (False, 3), (True, 6)],
)
def test_checkpoints_add_flops_to_the_hardware_and_none_to_the_model(
    use_reentrant: bool | None, again: int, target: Any
) -> None:
    graph = blocks(use_reentrant, target)
    flops = step_flops(graph.at())
    # Three blocks of two matmuls forward, of each the gradients of both factors backward; the
    # first matmul is a quarter of the others, and nobody wants its input's gradient.
    once = 3 * 2 * 3 * PRODUCT + 2 * PRODUCT / 4
    assert flops.model == once
    assert flops.hardware == once + again * PRODUCT
    # A batch of half the size has half the work.
    assert step_flops(graph.at(16)).model == flops.model / 2


def test_compiling_changes_neither_count() -> None:
    for use_reentrant in (None, False):
        graph = blocks(use_reentrant, "cuda")
        assert step_flops(compile_graph(graph, "compiled").at()) == step_flops(graph.at())


class Attention(nn.Module):
    """Causal attention of 2 heads of 8 numbers each, by a kernel or written out."""

    def __init__(self, *, written_out: bool) -> None:
        super().__init__()
        self.project, self.written_out = nn.Linear(16, 48, bias=False), written_out

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).view(3, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)
        if not self.written_out:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
        scores = (query @ key.transpose(-1, -2)).masked_fill(hidden, -torch.inf)
        return scores.softmax(-1) @ value


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_causal_attention_counts_whole_and_the_same_by_a_kernel_or_written_out(
    target: Any, precision: str
) -> None:
    kernel, written = (
        step_flops(
            trace_graph(
                Attention(written_out=written_out),
                torch.randn(3, 6, 16),
                target=target,
                precision=precision,
            ).at()
        )
        for written_out in (False, True)
    )
    # 18 tokens through a weight of 16 x 48, and its gradient; the input wants none.
    projection = 2 * 2 * 18 * 16 * 48
    # One product of 6 queries and 6 keys by 8 numbers in 2 heads of 3 samples: two forward, four
    # backward, and a fifth in the kernel, which computes the scores again.
    product = 2 * 3 * 2 * 6 * 6 * 8
    assert (written.model, written.hardware) == (projection + 6 * product,) * 2
    assert (kernel.model, kernel.hardware) == (projection + 6 * product, projection + 7 * product)


def test_mfu_is_proportional_to_the_rate_of_samples_and_hfu_tells_of_checkpoints() -> None:
    plain, again = (
        trace_graph(
            Blocks(use_reentrant, width=1024),
            torch.randn(512, 1024),
            target="cuda",
            precision="bf16",
        )
        for use_reentrant in (None, True)
    )
    one, two = (
        estimate(graph, "1x1:h100-sxm", batch_per_gpu=4096, accumulation_steps=3)
        for graph in (plain, again)
    )
    assert None not in (one.mfu_ratio, two.mfu_ratio, one.samples_per_s, two.samples_per_s)
    assert two.samples_per_s < one.samples_per_s
    assert two.mfu_ratio / one.mfu_ratio == pytest.approx(two.samples_per_s / one.samples_per_s)
    assert one.hfu_ratio == one.mfu_ratio
    # Three micro-batches of 4096 samples, through six weights of 4 x 1024 x 1024 three times and
    # through one of a quarter of them twice; 989.4 Tflop/s is the dense peak in bf16.
    product = 2 * 4096 * 4 * 1024 * 1024
    seconds = 3 * (6 * 3 + 2 / 4) * product / 989.4e12
    assert one.mfu_ratio == pytest.approx(seconds / one.step_time_s)
    assert two.hfu_ratio == pytest.approx(two.mfu_ratio * (18.5 + 6) / 18.5)
    table = estimate_many(again, ["1x1:h100-sxm"], batch_per_gpu=4096, accumulation_steps=3)
    assert table.mfu_ratio[0] == pytest.approx(two.mfu_ratio)
    assert table.hfu_ratio[0] == pytest.approx(two.hfu_ratio)


@pytest.mark.parametrize("batch", [512, (512, 512), (640, 128), (512, 511)])
@pytest.mark.parametrize("steps", [1, 3])
def test_mfu_is_all_flops_over_the_peaks_of_all_devices_whatever_the_batch(
    batch: int | tuple[int, int], steps: int
) -> None:
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False))
    graph = trace_graph(model, torch.randn(64, 1024), target="cuda", precision="bf16")
    asked = {"batch_per_gpu": batch, "accumulation_steps": steps}
    found = estimate(graph, "1x1:h100-sxm+1x3:a100-sxm-80gb", **asked)  # type: ignore[arg-type]
    first, others = (batch, batch) if isinstance(batch, int) else batch
    samples = steps * (first + 3 * others)
    # Through two weights forward, their gradients, and that of what lies between; dense peaks in
    # bf16 of the datasheets.
    flops = 5 * 2 * samples * 1024 * 1024
    seconds = flops / (989.4e12 + 3 * 312e12)
    assert found.mfu_ratio == pytest.approx(seconds / found.step_time_s)
    assert found.hfu_ratio == found.mfu_ratio
    if isinstance(batch, int):
        table = estimate_many(graph, [str(found.allocation)] * 2, **asked)  # type: ignore[arg-type]
        assert table.mfu_ratio == pytest.approx([found.mfu_ratio] * 2, rel=1e-9)


def test_mfu_of_a_pipeline_is_over_the_peaks_of_all_its_devices_too() -> None:
    layers = [nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*layers)
    graph = trace_graph(model, torch.randn(64, 1024), target="cuda", precision="bf16")
    asked = {"layout": "pp=2", "batch_per_gpu": 64, "accumulation_steps": 4}
    found = estimate(graph, "1x1:h100-sxm+1x1:a100-sxm-80gb", **asked)  # type: ignore[arg-type]
    # All products but the gradient of the input.
    flops = 4 * 64 * (4 * 3 - 1) * 2 * 1024 * 1024
    seconds = flops / (989.4e12 + 312e12)
    assert found.mfu_ratio == pytest.approx(seconds / found.step_time_s)


def test_convolutions_of_an_fp32_model_are_held_against_the_peak_of_tf32() -> None:
    model = nn.Sequential(nn.Conv2d(64, 256, 3, padding=1), nn.Flatten(), nn.Linear(256 * 16, 10))
    graph = trace_graph(model, torch.randn(512, 64, 4, 4), target="cuda")
    flops = step_flops(graph.at(512))
    # Forward and the weight's gradient; what comes in has none.
    assert flops.tf32_by_default == 2 * (2 * 512 * 16 * 256 * 64 * 9)
    answer = estimate(graph, "1x1:a100-sxm-80gb")
    # A100: 156 TFLOP/s in TF32, 19.5 in FP32.
    share = flops.tf32_by_default / flops.hardware
    at_peak_s = flops.model * (share / 156e12 + (1 - share) / 19.5e12)
    assert answer.mfu_ratio * answer.step_time_s == pytest.approx(at_peak_s)
