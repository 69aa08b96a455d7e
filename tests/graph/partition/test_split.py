"""The graph of one tensor-parallel rank, its shapes and collectives worked out by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from estimator.errors import StrategyError
from estimator.graph.ir.collectives import collectives_of
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.ir.structure import GraphStructure
from estimator.graph.partition import plan
from estimator.graph.partition.layout import split_by_layout
from estimator.graph.partition.partitioner import split
from estimator.graph.partition.plan import Plan, found_plan
from estimator.graph.partition.rules import Given, Placed, placed
from estimator.graph.partition.stages import held_between_passes
from estimator.graph.trace.trace import trace_graph
from estimator.workload.layouts import Layout

BATCH, TOKENS, WIDTH, INNER, HEADS = 4, 8, 16, 32, 4
FLOAT = 4
STREAM_BYTES = BATCH * TOKENS * WIDTH * FLOAT
MLP = Plan.of({"up": "colwise", "down": "rowwise"})


class Mlp(nn.Module):
    """Two linear layers without biases, and a residual stream around them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Adapted(nn.Module):
    """A frozen linear layer and what is trained beside it."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(ins, outs, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(ins, 4, bias=False), nn.Linear(4, outs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.b(self.a(x))


class AdaptedMlp(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Adapted(WIDTH, INNER), Adapted(INNER, WIDTH)


class Attention(nn.Module):
    """Fused queries, keys and values over some heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            part.view(len(x), TOKENS, HEADS, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x)).split(WIDTH, dim=-1)
        ]
        mixed = nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class Model(nn.Module):
    """An embedding, one block of attention and MLP, a last norm and layer, and a loss."""

    def __init__(self, words: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(words, WIDTH)
        self.attention, self.mlp = Attention(), Mlp()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.norm(self.mlp(self.attention(self.words(ids)))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def model_graph(words: int = 64) -> OpGraph:
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    return trace_graph(Model(words), ids, loss=lambda output, _: output)


MLP_GRAPH = trace_graph(Mlp(), torch.randn(BATCH, TOKENS, WIDTH))
MODEL = model_graph()


def divided_tokens(*, megatron: bool = False) -> OpGraph:
    """The model over two ranks that divide tokens too."""
    return split(MODEL, found_plan(MODEL, sequence=True), tp=2, megatron=megatron)


def exchanged(graph: OpGraph, batch: int | None = None) -> list[tuple[str, str, int]]:
    return [(c.phase, c.op, c.size_bytes) for c in collectives_of(graph.at(batch))]


def shapes(graph: OpGraph) -> dict[str, tuple[int, ...]]:
    return {parameter.name: parameter.spec.shape for parameter in graph.parameters}


def products(graph: OpGraph) -> list[tuple[tuple[int, ...], ...]]:
    """The shapes of every matmul in order: left, right."""
    return [
        tuple(spec.shape for spec in op.call.inputs)
        for op in graph.ops
        if op.call.target == "aten.mm.default"
    ]


def test_column_then_row_reduces_the_stream_once_a_pass() -> None:
    local = split(MLP_GRAPH, MLP, tp=2)
    assert exchanged(local) == [
        ("forward", "all_reduce", STREAM_BYTES),
        ("backward", "all_reduce", STREAM_BYTES),
    ]
    # A sum is made in a copy as by functional collectives.
    sums = [index for index, op in enumerate(local.ops) if "all_reduce" in op.call.target]
    assert [local.ops[index - 1].call.target for index in sums] == ["aten.clone.default"] * 2
    for index in sums:
        assert local.ops[index - 1].outputs == local.ops[index].inputs
    # Each divided module enters DTensor once a pass.
    entered = [(op.module, op.phase) for op in local.ops if op.enters_dtensor]
    assert sorted(entered) == [
        ("down", "backward"),
        ("down", "forward"),
        ("up", "backward"),
        ("up", "forward"),
    ]
    held = {parameter.name for parameter in local.parameters if parameter.is_dtensor}
    assert held == {"up.weight", "down.weight"}


def test_megatron_sums_in_place_and_gradients_beside_the_product_of_a_weight() -> None:
    local = split(MLP_GRAPH, MLP, tp=2, megatron=True)
    assert not any("clone" in op.call.target for op in local.ops)
    forward, backward = collectives_of(local.at())
    assert (forward.op, forward.beside) == ("all_reduce", None)
    assert backward.op == "all_reduce"
    # The gradient of up's weight: (INNER / 2 x rows) by (rows x WIDTH).
    product = local.ops[backward.beside].call
    assert product.outputs[0].shape == (INNER // 2, WIDTH)


def test_a_plan_asks_the_rules_about_equal_blocks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def counted(given: Given) -> Placed:
        asked.append(given.call.target)
        return placed(given)

    monkeypatch.setattr(plan, "placed", counted)

    def rules_of(blocks: int) -> list[str]:
        asked.clear()
        layers = nn.Sequential(*(Mlp() for _ in range(blocks)))
        plan = found_plan(trace_graph(layers, torch.randn(BATCH, TOKENS, WIDTH)))
        styles = [style for block in range(blocks) for style in ("column", "row")]
        assert [style for _, style in plan.styles] == styles
        return list(asked)

    assert rules_of(6) == rules_of(3)


def test_every_product_has_its_local_shapes() -> None:
    rows, half = BATCH * TOKENS, INNER // 2
    assert products(split(MLP_GRAPH, MLP, tp=2)) == [
        ((rows, WIDTH), (WIDTH, half)),  # up
        ((rows, half), (half, WIDTH)),  # down
        ((WIDTH, rows), (rows, half)),  # gradient of down's weight
        ((rows, WIDTH), (WIDTH, half)),  # of its input
        ((half, rows), (rows, WIDTH)),  # of up's weight
        ((rows, half), (half, WIDTH)),  # of its input, a term of a sum
    ]


def test_shapes_follow_the_batch() -> None:
    graph = MLP_GRAPH
    local = split(graph, MLP, tp=2)
    assert exchanged(local, 3 * BATCH)[0][2] == 3 * STREAM_BYTES
    again = split(trace_graph(Mlp(), torch.randn(3 * BATCH, TOKENS, WIDTH)), MLP, tp=2)
    assert [call.outputs for call in local.at(3 * BATCH).calls] == [
        op.call.outputs for op in again.ops
    ]
    # One rank is the graph itself.
    assert split(graph, MLP, tp=1) is graph


def test_sequence_parallelism_scatters_and_gathers_the_same_bytes() -> None:
    plain = exchanged(split(MODEL, found_plan(MODEL), tp=2))
    divided = exchanged(divided_tokens())
    ring = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}

    def moved(found: list[tuple[str, str, int]]) -> int:
        """Of the stream alone: gradients of norms are summed beside."""
        return sum(ring[op] * size for _, op, size in found if size == STREAM_BYTES)

    assert {op for _, op, size in divided if size == STREAM_BYTES} == {
        "all_gather",
        "reduce_scatter",
    }
    # Attention and MLP: a sum each way, of twice the bytes of a gather or a scatter. Beside them
    # the embedding's output is scattered and its gradient gathered, and the last layer's input
    # gathered; its gradient is whole, and cut for nothing.
    assert moved(plain) == 4 * 2 * STREAM_BYTES
    assert moved(divided) == moved(plain) + 3 * STREAM_BYTES


def test_as_in_megatron_the_backward_pass_gathers_again_beside_a_product() -> None:
    local = divided_tokens(megatron=True)
    found = collectives_of(local.at())
    # What attention, the MLP and the last layer gathered of divided tokens is gathered again.
    gathered = [c for c in found if c.op == "all_gather" and c.phase == "backward"]
    plain = collectives_of(divided_tokens().at())
    assert len(gathered) == 3 + sum(c.op == "all_gather" and c.phase == "backward" for c in plain)
    # That and the scattered sums of two layers' gradients run beside a product of their layer.
    beside = [local.ops[c.beside] for c in found if c.beside is not None]
    assert sorted(op.module for op in beside) == ["attention.qkv"] * 2 + ["head"] + ["mlp.up"] * 2
    assert {(op.call.target, op.phase) for op in beside} == {("aten.mm.default", "backward")}
    assert not any(c.beside for c in plain)


def test_what_is_gathered_is_kept_by_torch_and_not_by_megatron() -> None:
    kept, by_megatron = (
        held_between_passes(local.at(), GraphStructure.of(local))
        for local in (divided_tokens(), divided_tokens(megatron=True))
    )
    # The whole input of three layers, and not the half of it that a norm makes.
    assert kept - by_megatron == 3 * STREAM_BYTES // 2


def test_megatron_copies_nothing_to_sum_or_to_order_tokens() -> None:
    own, local = (
        sum(op.call.target == "aten.clone.default" for op in graph.ops)
        for graph in (MODEL, divided_tokens(megatron=True))
    )
    assert local == own


def test_tokens_are_divided_between_the_layers() -> None:
    local = divided_tokens()
    norms = [op for op in local.ops if op.call.target == "aten.native_layer_norm.default"]
    assert [op.call.inputs[0].shape for op in norms] == [(BATCH, TOKENS // 2, WIDTH)] * 3
    # Gradients of what is whole on divided tokens are summed.
    sums = [size for phase, op, size in exchanged(local) if op == "all_reduce"]
    # A weight and a bias of each of three norms; row layers see gathered gradients.
    assert sums == [WIDTH * FLOAT] * 6
    # Divided tokens are put in order by a copy after each gather.
    ops = [op.call.target.split(".")[1] for op in divided_tokens().ops]
    gathers = [index for index, name in enumerate(ops) if name == "all_gather"]
    scatters = [index for index, name in enumerate(ops) if name == "reduce_scatter"]
    assert {ops[index + 1] for index in gathers} == {"clone"}
    assert {ops[index - 1] for index in scatters} == {"clone"}


def test_gradients_of_three_layers_are_added_where_tokens_are_divided() -> None:
    model = nn.ModuleList(nn.Linear(WIDTH, INNER, bias=False) for _ in range(3))
    model.append(nn.Linear(INNER, WIDTH, bias=False))

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layers = nn.LayerNorm(WIDTH), model

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return x + self.layers[3](sum(torch.relu(layer(y)) for layer in self.layers[:3]))

    plan = Plan.of({"layers.0": "colwise", "layers.1": "colwise", "layers.2": "colwise"})
    styles = (*plan.styles, ("layers.3", "row"))
    graph = trace_graph(Three(), torch.randn(BATCH, TOKENS, WIDTH))
    found = exchanged(split(graph, Plan(styles, sequence=True), tp=2))
    # The stream begins whole here: only the gradient of the row layer's output is gathered.
    assert [row for row in found if row[1] == "all_gather"] == []
    scattered = [phase for phase, op, _ in found if op == "reduce_scatter"]
    assert scattered == ["forward", "backward", "backward", "backward"]


def test_the_plan_is_found_from_the_dataflow() -> None:
    styles = dict(found_plan(MODEL).styles)
    assert styles == {
        "attention.qkv": "column",
        "attention.out": "row",
        "mlp.up": "column",
        "mlp.down": "row",
    }


def test_heads_are_divided_inside_of_attention() -> None:
    local = split(MODEL, found_plan(MODEL), tp=2)
    (attention,) = [op for op in local.ops if "_for_cpu.default" in op.call.target]
    width = WIDTH // HEADS
    assert attention.call.inputs[0].shape == (BATCH, HEADS // 2, TOKENS, width)


def test_a_divided_vocabulary_reduces_rows_of_the_loss() -> None:
    words = 64
    plan = found_plan(model_graph(words), sequence=False, vocabulary=True)
    local = split(model_graph(words), plan, tp=2)
    rows = BATCH * TOKENS
    forward = [size for phase, _, size in exchanged(local) if phase == "forward"]
    # The embedding, attention, MLP; the maximum, the sum and the targets of every row.
    assert forward == [STREAM_BYTES] * 3 + [rows * FLOAT] * 3
    sizes = shapes(local)
    assert sizes["words.weight"] == sizes["head.weight"] == (words // 2, WIDTH)


@pytest.mark.parametrize(
    ("graph", "plan", "tp", "said"),
    [
        (MODEL, found_plan(MODEL), 3, "tp=3 does not divide the .* choose a divisor"),
        (MODEL, found_plan(MODEL), 5, "tp=5 does not divide the .* choose a divisor"),
        (MODEL, found_plan(MODEL), 8, "tp=8 does not divide the .* divides its heads"),
        (
            MLP_GRAPH,
            Plan.of({"layers.*.up": "colwise"}),
            2,
            "names no module of the model: it has 'layers",
        ),
    ],
)
def test_a_degree_or_a_plan_that_does_not_fit_is_refused(
    graph: OpGraph, plan: Plan, tp: int, said: str
) -> None:
    with pytest.raises(StrategyError, match=said):
        split(graph, plan, tp=tp)


def test_an_unknown_style_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"style 'diagonal' of 'up' is unknown; use one of"):
        Plan.of({"up": "diagonal"})


def test_styles_of_torch_are_read() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    assert Plan.of({"up": ColwiseParallel(), "down": RowwiseParallel()}).styles == MLP.styles


def test_words_are_divided_unevenly_where_they_must_be() -> None:
    local = split(model_graph(63), found_plan(model_graph(63), sequence=True), tp=2)
    sizes = shapes(local)
    assert sizes["words.weight"] == (32, WIDTH)


def test_weights_that_are_cast_are_divided_too() -> None:
    graph = trace_graph(Mlp(), torch.randn(BATCH, TOKENS, WIDTH), precision="bf16-amp")
    local = split(graph, MLP, tp=2)
    assert sorted(products(local)) == sorted(products(split(MLP_GRAPH, MLP, tp=2)))
    # The product is in half of the bytes; its gradient is cast before it is summed.
    assert exchanged(local) == [
        ("forward", "all_reduce", STREAM_BYTES // 2),
        ("backward", "all_reduce", STREAM_BYTES),
    ]


def test_a_prepared_input_is_reduced_once_for_all_that_take_it() -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import PrepareModuleInput

    prepared = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    plain = {"up": "colwise", "down": "rowwise"}
    assert not Plan.of(plain).reduces_once
    assert Plan.of(plain | {"block": prepared}).reduces_once


def test_a_gathered_layer_holds_its_columns_alone() -> None:
    styles = dict(found_plan(MODEL).styles) | {"head": "colwise_gather_output"}
    local = split(MODEL, Plan.of(styles), tp=2)
    sizes = shapes(local)
    assert sizes["head.weight"] == (32, WIDTH)
    # The gradient of its weight: (words, tokens) x (tokens, width).
    assert ((32, BATCH * TOKENS), (BATCH * TOKENS, WIDTH)) in products(local)


def test_rotary_positions_in_complex_numbers_are_divided_over_heads() -> None:
    class Rotary(Attention):
        def forward(self, x: Tensor) -> Tensor:
            heads = [
                part.view(len(x), TOKENS, HEADS, -1).transpose(1, 2)
                for part in self.qkv(self.norm(x)).split(WIDTH, dim=-1)
            ]
            pairs = torch.view_as_complex(heads[0].reshape(*heads[0].shape[:-1], -1, 2))
            turned = torch.view_as_real(pairs * torch.ones(1, dtype=torch.complex64)).flatten(3)
            mixed = nn.functional.scaled_dot_product_attention(turned, heads[1], heads[2])
            return x + self.out(mixed.transpose(1, 2).reshape(x.shape))

    graph = trace_graph(Rotary(), torch.randn(BATCH, TOKENS, WIDTH))
    plan = found_plan(graph)
    assert plan.style_of("qkv") == "column"
    assert plan.style_of("out") == "row"
    rank = split(graph, plan, tp=2)
    assert not any("want of a rule" in each for each in rank.assumptions)
    # Of 2 ranks each has 2 heads of 4 channels: queries, keys and values of 8 each.
    (first, *_) = (op for op in rank.ops if op.call.target == "aten.addmm.default")
    assert first.call.outputs[0].shape == (BATCH * TOKENS, 3 * WIDTH // 2)


def test_the_first_pattern_that_names_a_module_gives_its_style() -> None:
    plan = Plan.of({"up": "colwise", "layers.*.up": "rowwise", "layers.0.down": "rowwise"})
    names = ("layers.0.up", "up", "model.layers.0.down", "layers.10.down", "setup")
    assert plan.styles_of(names) == {
        "layers.0.up": "column",
        "up": "column",
        "model.layers.0.down": "row",
        "layers.10.down": None,
        "setup": None,
    }
    assert Plan.of({"layers.*.up": "rowwise", "up": "colwise"}).style_of("layers.0.up") == "row"


class HeadNorm(nn.Module):
    """A column, a norm of each head, and a row, with the plan that a config has of them."""

    def __init__(self, plan: dict[str, str]) -> None:
        super().__init__()
        self.config = SimpleNamespace(base_model_tp_plan=plan)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.norm = nn.RMSNorm(INNER // HEADS)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.norm(self.up(x).view(len(x), TOKENS, HEADS, -1))
        return x + self.down(heads.flatten(2))


COLUMN_NORM_ROW = {
    "up": "colwise",
    "norm": "replicated_with_grad_allreduce",
    "down": "rowwise",
    "experts": "moe_tp_experts",
}


def configured(plan: dict[str, str]) -> OpGraph:
    return trace_graph(HeadNorm(plan), torch.randn(BATCH, TOKENS, WIDTH))


def test_the_plan_of_a_model_s_config_is_kept_and_followed(tmp_path: Path) -> None:
    configured(COLUMN_NORM_ROW).save(tmp_path / "a.graph")
    graph = OpGraph.load(tmp_path / "a.graph")
    local = split_by_layout(graph, Layout.parse("tp=2,dp=*"))
    assert "base_model_tp_plan of its config" in local.assumptions[-1]
    # The norm works on the rank's heads: of it only the gradient of its weight is summed.
    assert exchanged(local) == [
        ("forward", "all_reduce", STREAM_BYTES),
        ("backward", "all_reduce", INNER // HEADS * FLOAT),
    ]
    asked = split_by_layout(graph, Layout.parse("tp=2,dp=*"), Plan.of({"up": "gather"}))
    assert "the plan given" in asked.assumptions[-1]


@pytest.mark.parametrize("plan", [{}, {"layers.*.up": "colwise"}, {"experts": "moe_tp_experts"}])
def test_a_config_that_names_nothing_to_divide_leaves_it_to_the_dataflow(
    plan: dict[str, str],
) -> None:
    local = split_by_layout(configured(plan), Layout.parse("tp=2,dp=*"))
    assert "found from its dataflow" in local.assumptions[-1]


def test_adapters_are_divided_as_the_frozen_layers_beside_them() -> None:
    graph = trace_graph(AdaptedMlp(), torch.randn(BATCH, TOKENS, WIDTH))
    styles = dict(found_plan(graph).styles)
    column, row = ("up.layer", "up.b"), ("down.layer", "down.a")
    assert styles == dict.fromkeys(column, "column") | dict.fromkeys(row, "row")
    local = split_by_layout(graph, Layout(tp=2))
    # Frozen are both large weights, a half of each on a rank.
    assert graph.frozen_parameter_bytes == 2 * local.frozen_parameter_bytes == 2 * 4 * WIDTH * INNER
