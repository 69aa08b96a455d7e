"""Stages of a traced model: every op once, what passes between them, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn

from estimator import OpGraph, trace_model
from estimator.errors import WorkloadError
from estimator.graph.ir.structure import GraphStructure, value_roots
from estimator.graph.partition.layout import split_by_layout
from estimator.graph.partition.stages import (
    Blocks,
    held_between_passes,
    pass_seconds,
    split_points,
    stage_graphs,
    weight_shares,
)
from estimator.workload.layouts import Layout


class Model(nn.Module):
    """An embedding, residual blocks under a mask, and a head tied to the embedding."""

    def __init__(self, blocks: int, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(blocks))
        self.head = nn.Linear(16, 50, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens > 0).float()[..., None]
        state = self.embedding(tokens)
        for layer in self.layers:
            state = state + torch.relu(layer(state)) * mask
        return self.head(state).logsumexp(-1).mean()


def traced(blocks: int = 4, *, tied: bool = False) -> OpGraph:
    return trace_model(Model(blocks, tied=tied), torch.zeros(8, 10, dtype=torch.long))


def test_every_op_is_in_one_stage_but_for_masks() -> None:
    graph = traced()
    first, second = stage_graphs(graph, ["layers.2"])
    assert sorted({*first.ops, *second.ops}) == list(range(len(graph.ops)))
    again = [graph.ops[index] for index in set(first.ops) & set(second.ops)]
    assert {op.phase for op in again} == {"forward"}
    assert {op.module for op in again} == {""}
    assert first.graph.parameter_count == 50 * 16 + 2 * (16 * 16 + 16)
    assert second.graph.parameter_count == graph.parameter_count - first.graph.parameter_count
    # One activation passes between blocks.
    # 8 sequences of 10 tokens of 16 fp32 numbers.
    assert first.sent_bytes(graph.at()) == 8 * 10 * 16 * 4
    assert first.sent_bytes(graph.at(24)) == 24 * 10 * 16 * 4
    assert second.sent == ()
    received = [v for v in second.graph.values if v.kind == "input" and v.spec.shape == (8, 10, 16)]
    assert len(received) == 1


def test_a_stage_is_a_graph_of_its_own_at_any_batch() -> None:
    for stage in stage_graphs(traced(), ["layers.1", "layers.3"]):
        bound = stage.graph.at(64)
        assert len(bound.calls) == len(stage.graph.ops)
        assert all(p.gradient is not None for p in stage.graph.parameters)
        for parameter in stage.graph.parameters:
            assert parameter.gradient in stage.graph.ops[parameter.ready_after].outputs


def test_stages_of_a_compiled_step_have_the_gradients_that_its_kernels_make() -> None:
    model = Model(4)
    batch = torch.zeros(8, 10, dtype=torch.long)
    graph = trace_model(model, batch, target="cuda", compiled=True)
    stages = stage_graphs(graph, ["layers.2"])
    trained = [p for stage in stages for p in stage.graph.parameters if p.gradient is not None]
    assert len(trained) == len(graph.parameters)
    for stage in stages:
        for parameter in stage.graph.parameters:
            assert parameter.gradient in stage.graph.ops[parameter.ready_after].outputs


class Viewing(nn.Module):
    """Blocks whose pointwise work is on views, as those of transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        state = self.embedding(tokens)
        for layer in self.layers:
            rows = layer(state).view(-1, 4, 4).transpose(1, 2)
            state = state + torch.relu(rows).transpose(1, 2).reshape(state.shape)
        return state.sum()


def test_a_compiled_stage_receives_each_tensor_once_whatever_views_were_fused() -> None:
    batch = torch.zeros(8, 10, dtype=torch.long)
    graph = trace_model(Viewing(), batch, target="cuda", compiled=True)
    roots = value_roots(graph)
    for stage in stage_graphs(graph, ["layers.1", "layers.2", "layers.3"]):
        ops = [graph.ops[index] for index in stage.ops]
        made = {roots[value] for op in ops for value in op.outputs}
        read = {roots[value] for op in ops for value in op.inputs}
        comes = [root for root in read - made if graph.values[root].kind in ("activation", "input")]
        values = stage.graph.values
        received = [v for v in values if v.kind == "input" and v.base is None]
        expected = sum(graph.values[root].spec.nbytes for root in comes)
        assert sum(value.spec.nbytes for value in received) == expected


def test_stages_of_a_tied_vocabulary_are_alike_in_compiled_steps() -> None:
    config = transformers.GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=256)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.zeros(2, 16, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    graph = trace_model(model, batch, target="cuda", compiled=True)
    rank = split_by_layout(graph, Layout.parse("tp=4,vocab"))
    owner = Blocks.of(rank).owner
    products = [owner[n] for n, op in enumerate(rank.ops) if op.call.target.startswith("aten.mm")]
    # Of a block's four linear layers the gradients of inputs and weights; two more of the head,
    # whose forward product is the fifth of the last block.
    assert [products.count(block) for block in range(4)] == [8, 8, 8, 11]


def test_a_tied_weight_has_a_gradient_on_both_ends() -> None:
    first, middle, last = stage_graphs(traced(tied=True), ["layers.1", "layers.2"])
    held = [[p.name for p in stage.graph.parameters] for stage in (first, middle, last)]
    assert "embedding.weight" in held[0]
    assert "embedding.weight" not in held[1]
    assert "embedding.weight" in held[2]


def test_a_waiting_micro_batch_holds_what_its_backward_pass_will_read() -> None:
    stages = stage_graphs(traced(tied=True), ["layers.1", "layers.2"])
    held = [
        held_between_passes(stage.graph.at(), GraphStructure.of(stage.graph)) for stage in stages
    ]
    # 8 x 10 states of 16 fp32, the mask in fp32, the tokens in int64: whole blocks of 64 bytes.
    state, mask, tokens = 5120, 320, 640
    # The input of its layer and what relu made; neither gradients that come back nor, in the first
    # stage, the part of the tied weight's gradient that the last one sends.
    assert held[1] == 2 * state + mask + tokens
    assert held[0] <= held[1]


def test_a_stage_of_torch_holds_what_it_has_sent() -> None:
    _, middle, last = stage_graphs(traced(), ["layers.1", "layers.2"])
    structure = GraphStructure.of(middle.graph)
    freed = held_between_passes(middle.graph.at(), structure)
    # One state of 8 x 10 x 16 fp32.
    assert held_between_passes(middle.graph.at(), structure, middle.outputs) == freed + 5120
    assert last.outputs == ()


def test_blocks_are_the_points_and_cuts_balance_the_time() -> None:
    graph = traced(6)
    assert split_points(graph) == tuple(f"layers.{n}" for n in range(6))
    even = np.array([1.0 if op.module.startswith("layers") else 0.0 for op in graph.ops])
    assert Blocks.of(graph).balanced(3, even) == ("layers.2", "layers.4")
    # The head takes as long as two blocks.
    of_block = sum(even) / 6
    head = sum(op.module == "head" for op in graph.ops)
    loaded = even + [2 * of_block / head if op.module == "head" else 0.0 for op in graph.ops]
    assert Blocks.of(graph).balanced(2, loaded) == ("layers.4",)
    assert Blocks.of(graph).balanced(1, even) == ()
    # Beside a host that is the longer lane everywhere, the head's kernels cost nothing.
    assert Blocks.of(graph).balanced(2, loaded, 10 * even) == ("layers.3",)
    assert Blocks.of(graph).even(3) == ("layers.2", "layers.4")
    assert Blocks.of(graph).even(4) == ()


def test_a_linear_layers_weight_gradient_waits_for_nothing() -> None:
    graph = traced(2)
    _, second = stage_graphs(graph, ["layers.1"])
    shares = weight_shares(second.graph)
    alone = [second.graph.ops[index] for index in np.flatnonzero(shares == 1.0)]
    matmuls = [op.name for op in alone if op.call.target == "aten.mm.default"]
    # Of the block's four products backward two make the gradients of weights, the head's own too.
    assert len(matmuls) == 2
    ops = second.graph.ops
    is_product = [op.call.target in ("aten.mm.default", "aten.addmm.default") for op in ops]
    seconds = np.array(is_product, dtype=np.float64)
    assert pass_seconds(is_forward(second.graph), shares, seconds) == (2.0, 2.0, 2.0)


def is_forward(graph: OpGraph) -> NDArray[np.bool_]:
    return np.array([op.phase == "forward" for op in graph.ops])


def test_the_first_stage_has_no_gradient_of_its_input() -> None:
    first, _ = stage_graphs(traced(2), ["layers.1"])
    of = is_forward(first.graph), weight_shares(first.graph)
    forward, of_input, of_weights = pass_seconds(*of, np.ones(len(first.ops)))
    assert of_input == 0.0
    assert forward + of_weights == len(first.ops)


def test_names_that_make_no_stages_are_refused() -> None:
    graph = traced(3)
    with pytest.raises(WorkloadError, match=r"'layers\.9' names no module of Model that computes"):
        stage_graphs(graph, ["layers.9"])
    with pytest.raises(WorkloadError, match=r"begins at 'layers\.1' would leave the one before"):
        stage_graphs(graph, ["layers.2", "layers.1"])
    with pytest.raises(WorkloadError, match=r"3 repeated blocks, which cannot make 4 stages"):
        Blocks.of(graph).balanced(4, [1.0] * len(graph.ops))


def test_stages_that_compute_the_same_have_the_same_graph() -> None:
    graph = traced(6)
    stages = stage_graphs(graph, ["layers.1", "layers.2", "layers.4"])
    # The first has the embedding, the last the head, and two blocks are not one.
    assert len({id(stage.graph) for stage in stages}) == 4
    first, second, third, last = stage_graphs(graph, ["layers.1", "layers.2", "layers.3"])
    assert second.graph is third.graph
    assert first.graph is not second.graph is not last.graph
    assert set(second.parameters) == {"layers.1.weight", "layers.1.bias"}
    assert set(third.parameters) == {"layers.2.weight", "layers.2.bias"}
    assert third.point == "layers.2"


class FrozenTrunk(nn.Module):
    """Frozen blocks of a shape of their own under blocks that are trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, hidden, bias=False), nn.Linear(hidden, 16, bias=False))
            for hidden in (width, width, 24, 24)
        )
        self.layers[:2].requires_grad_(False)

    def forward(self, state: Tensor) -> Tensor:
        for layer in self.layers:
            state = torch.relu(layer(state))
        return state.mean()


@pytest.mark.parametrize("width", [24, 32], ids=["as those that are trained", "another shape"])
def test_what_frozen_blocks_make_is_passed_on_whatever_their_shapes(width: int) -> None:
    graph = trace_model(FrozenTrunk(width), torch.randn(8, 16))
    first, second = stage_graphs(graph, ["layers.2"])
    # 8 rows of 16 fp32 numbers go on; no stage computes the blocks of another one again.
    assert first.sent_bytes(graph.at()) == 8 * 16 * 4
    assert set(first.ops) & set(second.ops) == set()
    assert {op.module.split(".")[1] for op in second.graph.ops if op.module} == {"2", "3"}
