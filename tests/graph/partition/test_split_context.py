"""The graph of one context-parallel rank: by hand, and as torch's ring attention runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.experimental._context_parallel import _attention as by_torch
from torch.utils._python_dispatch import TorchDispatchMode

from estimator.errors import StrategyError
from estimator.graph.compile.fusion import compile_graph
from estimator.graph.costs.registry import argument
from estimator.graph.ir.collectives import collectives_of, is_collective
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.ir.ops import Execution
from estimator.graph.partition.context import split_context
from estimator.graph.partition.layout import split_by_layout
from estimator.graph.partition.partitioner import split
from estimator.graph.partition.plan import found_plan
from estimator.graph.trace.trace import trace_graph
from estimator.workload.layouts import Layout
from tests.synthetic import fake_ranks

BATCH, TOKENS, WIDTH, HEADS, WORDS = 2, 16, 16, 4, 64
FLOAT = 4
STREAM_BYTES = BATCH * TOKENS * WIDTH * FLOAT
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"


class Model(nn.Module):
    """An embedding, one layer of attention, a norm, a last layer, and a loss."""

    def __init__(self, *, causal: bool = True, fused: bool = True) -> None:
        super().__init__()
        self.causal, self.fused = causal, fused
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(TOKENS)[None])
        q, k, v = (
            layer(x).view(len(x), -1, HEADS, WIDTH // HEADS).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        if self.fused:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            mixed = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        x = self.norm(x + self.out(mixed.transpose(1, 2).reshape(x.shape)))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def graph_of(**form: bool) -> OpGraph:
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    return trace_graph(Model(**form), ids, loss=lambda output, _: output)


def exchanged(graph: OpGraph, batch: int | None = None) -> list[tuple[str, str, int]]:
    return [(each.phase, each.op, each.size_bytes) for each in collectives_of(graph.at(batch))]


def blocks(graph: OpGraph) -> list[tuple[int, int, bool]]:
    """(queries, keys, whether masked) of every call of attention."""
    found = []
    for op in graph.ops:
        if op.call.target.startswith(ATTENTION):
            backward = "backward" in op.call.target
            query, key = op.call.arguments[backward : backward + 2]
            causal = argument(op.call, 7 if backward else 4, "is_causal", False)
            found.append((query.shape[2], key.shape[2], causal))
    return found


def test_keys_and_values_are_gathered_once_a_pass_and_their_gradients_go_around() -> None:
    local = split_context(graph_of(), cp=4)
    # Both of all ranks; a hop is a third of the gather of four parts.
    both = 2 * STREAM_BYTES
    assert exchanged(local) == [
        ("forward", "all_gather", both),
        ("backward", "all_gather", both),
        *[("backward", "all_gather", both)] * 4,
    ]
    shares = [each.share for each in collectives_of(local.at())]
    assert shares == pytest.approx([1.0, 1.0, *[1 / 3] * 4])


def test_a_ring_sends_what_a_gather_does_hop_by_hop() -> None:
    local = split_context(graph_of(), cp=4, ring=True)
    forward = [each for each in collectives_of(local.at()) if each.phase == "forward"]
    assert len(forward) == 3
    sent = sum(each.share * each.size_bytes for each in forward)
    assert sent == pytest.approx(2 * STREAM_BYTES)


def test_under_a_mask_ranks_compute_an_equal_share_of_what_it_leaves() -> None:
    own = TOKENS // 4
    masked = [(own, own, True), *[(own, own // 2, False)] * 3]
    assert blocks(split_context(graph_of(), cp=4)) == masked * 2
    whole = [(own, own, False)] * 4
    assert blocks(split_context(graph_of(causal=False), cp=4)) == whole * 2


def test_every_layer_works_on_the_rank_s_tokens_and_holds_all_weights() -> None:
    graph = graph_of()
    local = split_context(graph, cp=2)
    rows = BATCH * TOKENS // 2
    products = [op.call.inputs[-2:] for op in local.ops if "addmm" in op.call.target]
    assert products
    assert all(left.shape[0] == rows for left, _ in products if left.shape[1] == WIDTH)
    assert [p.spec for p in local.parameters] == [p.spec for p in graph.parameters]
    for parameter in local.parameters:
        assert local.values[parameter.gradient].spec.numel == parameter.spec.numel


def test_calls_fit_their_values_at_any_batch() -> None:
    for ring in (False, True):
        bound = split_context(graph_of(), cp=2, ring=ring).at(3 * BATCH)
        (first, *_) = collectives_of(bound)
        assert first.size_bytes == 3 * 2 * STREAM_BYTES
        for op, call in zip(bound.graph.ops, bound.calls, strict=True):
            if "block" not in op.name and not is_collective(call):
                assert [bound.specs[value].numel for value in op.outputs] == [
                    spec.numel for spec in call.outputs
                ]


def test_heads_and_tokens_are_divided_together() -> None:
    graph = graph_of()
    both = split(split_context(graph, cp=2), found_plan(graph, sequence=False), tp=2)
    of_cp = [each for each in collectives_of(both.at()) if each.axis == "cp"]
    # Half of the heads on each rank.
    assert {each.size_bytes for each in of_cp} == {2 * STREAM_BYTES // 2}
    of_tp = [each.size_bytes for each in collectives_of(both.at()) if each.axis == "tp"]
    assert set(of_tp) == {STREAM_BYTES // 2}
    assert blocks(both) == blocks(split_context(graph, cp=2))


def test_tokens_that_do_not_divide_are_refused() -> None:
    with pytest.raises(StrategyError, match="have 16 tokens; choose a multiple of 10"):
        split_context(graph_of(), cp=5)


def test_attention_that_is_not_fused_is_refused() -> None:
    with pytest.raises(StrategyError, match="use scaled_dot_product_attention"):
        split_context(graph_of(fused=False), cp=2)


# What torch's own ring attention does on one rank of a fake process group.


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []
        self.blocks: list[tuple[int, int, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith("_c10d_functional.all_"):
            self.sent.append((name.split(".")[1], max(args[0].nbytes, found.nbytes)))
        return found

    def attention(self, query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Any:
        self.blocks.append((query.shape[2], key.shape[2], more["is_causal"]))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, more["is_causal"]
        )

    def gradients(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, **more: Any
    ) -> Any:
        self.blocks.append((query.shape[2], key.shape[2], more["is_causal"]))
        return tuple(torch.zeros_like(each) for each in (query, key, value))


def torch_runs(ranks: int, *, ring: bool) -> _Watch:
    """Both passes of torch's ring attention on the last of some ranks."""
    own = (BATCH, HEADS, TOKENS // ranks, WIDTH // HEADS)
    q, k, v, out = (torch.randn(own) for _ in range(4))
    by_torch.set_rotate_method("alltoall" if ring else "allgather")
    try:
        with fake_ranks(ranks, rank=ranks - 1), _Watch() as watch:
            group = dist.group.WORLD
            by_torch._templated_ring_attention(group, 2, watch.attention, q, k, v, is_causal=True)
            by_torch._templated_ring_attention_backward(
                group, 2, watch.gradients, out, "grad_out", q, k, v, out, out[..., 0], True
            )
    finally:
        by_torch.set_rotate_method("allgather")
    return watch


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_blocks_and_bytes_are_those_of_torch(ranks: int, ring: bool) -> None:
    local, theirs = split_context(graph_of(), cp=ranks, ring=ring), torch_runs(ranks, ring=ring)
    assert blocks(local) == theirs.blocks
    sent = []
    for each in collectives_of(local.at()):
        if each.share < 1.0 or each.op != "all_gather" or "permute" in _target(local, each):
            sent.append(("all_to_all_single", each.size_bytes // ranks))
        else:
            sent.append(("all_gather_into_tensor", each.size_bytes))
    assert sent == theirs.sent


def _target(graph: OpGraph, each: Any) -> str:
    return graph.ops[each.op_index].call.target


@pytest.mark.parametrize("execution", ["compiled", "compiled-blocks"])
@pytest.mark.parametrize("layout", ["cp=2,dp=*", "tp=2,sp,vocab,dp=*", "tp=2,cp=2,dp=*"])
def test_a_compiled_step_is_divided_before_it_is_compiled(
    execution: Execution, layout: str, tmp_path: Path
) -> None:
    eager = graph_of()
    compiled = replace(compile_graph(eager, execution), eager=eager)
    compiled.save(tmp_path / "compiled.graph")
    local = split_by_layout(OpGraph.load(tmp_path / "compiled.graph"), Layout.parse(layout))
    assert local.execution == execution
    assert local.eager is None
    assert len(local.ops) < len(split_by_layout(eager, Layout.parse(layout)).ops)
    # The compiler takes no collective for a view of what it sends, and leaves none out.
    assert sorted(exchanged(local)) == sorted(
        exchanged(split_by_layout(eager, Layout.parse(layout)))
    )


def test_a_compiled_step_without_its_eager_operators_is_refused() -> None:
    compiled = compile_graph(graph_of(), "compiled")
    with pytest.raises(StrategyError, match="saved without its eager operators, which cp divides"):
        split_by_layout(compiled, Layout.parse("cp=2,dp=*"))
