"""A few equal blocks divided stand for all of them: the graph is that of all divided, op by op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from estimator import OpGraph
from estimator.estimates.engine import Engine
from estimator.graph.ir.ops import GraphColumns
from estimator.graph.partition.layout import split_by_layout
from estimator.graph.partition.repeats import Repeats
from estimator.graph.trace.trace import trace_graph
from estimator.workload.layouts import Layout
from tests.graph.partition.test_split import Attention, Mlp

TOKENS, WIDTH, WORDS = 8, 16, 64
LAYOUTS = (
    Layout(tp=2),
    Layout(tp=2, sequence=True, vocabulary=True),
    Layout(tp=2, megatron=True, sequence=True),
    Layout(cp=2),
    Layout(tp=2, cp=2),
)


class Deep(nn.Module):
    """An embedding, blocks of attention and MLP, and a loss, to which `odd` blocks add their own.

    With `checkpointed` the backward pass computes blocks again; one that is `cached` holds two
    tensors of each block, as a cache of keys and values does: until the loss is there, and where
    blocks are computed again until the last one was.
    """

    def __init__(
        self, blocks: int, *, odd: bool = False, checkpointed: bool = False, cached: bool = False
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(Attention(), Mlp()) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.odd, self.checkpointed, self.cached = odd, checkpointed, cached

    def ran(self, layer: nn.Module, state: Tensor, more: list[Tensor]) -> Tensor:
        state = layer(state)
        if self.cached:
            more += [state * 2, state.transpose(0, 1).contiguous()]
        return state

    def forward(self, ids: Tensor) -> Any:
        state, more = self.words(ids), list[Tensor]()
        for layer in self.layers:
            if self.checkpointed:
                run = torch.utils.checkpoint.checkpoint
                state = run(self.ran, layer, state, more, use_reentrant=False)
            else:
                state = self.ran(layer, state, more)
            if self.odd:
                more.append(state.square().mean())
        logits = self.head(state)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        if self.cached:
            return {"loss": loss, "states": more}
        return loss + torch.stack(more).sum() if self.odd else loss


def deep(blocks: int, *, precision: str = "fp32", **how: Any) -> OpGraph:
    ids = torch.zeros(4, TOKENS, dtype=torch.long)
    return trace_graph(Deep(blocks, **how), ids, precision=precision)


def repeats_of(graph: OpGraph) -> Repeats | None:
    return Repeats.of(graph, GraphColumns.of(graph))


def wired(graph: OpGraph) -> tuple[object, ...]:
    """All that a graph computes, its values numbered as they are met."""
    numbers: dict[int, int] = {}

    def met(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(numbers.setdefault(value, len(numbers)) for value in values)

    ops = [
        (
            *(op.call, op.other_call, op.phase, op.module, op.is_view, op.is_repeated),
            *(op.enters_dtensor, met(op.inputs), met(op.outputs), sorted(met(op.holds))),
        )
        for op in graph.ops
    ]
    values = {
        numbers[number]: (
            *(value.spec, value.other_spec, value.kind),
            None if value.base is None else numbers.get(value.base),
        )
        for number, value in enumerate(graph.values)
        if number in numbers
    }
    parameters = [
        (p.name, p.spec, numbers[p.gradient or 0], p.ready_after, p.is_dtensor)
        for p in graph.parameters
    ]
    return ops, values, parameters, graph.assumptions, len(graph.values)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"checkpointed": True},
        {"cached": True},
        {"checkpointed": True, "cached": True},
        # Autocast lets go of what it has cast once the loss is there.
        {"precision": "bf16-amp"},
    ],
)
def test_blocks_that_are_left_out_come_back_as_if_all_had_been_divided(how: Any) -> None:
    graph = deep(9, **how)
    few = repeats_of(graph)
    # The first, the last, two behind the first and one before the last stay.
    assert len(few.units) == 9 - 5
    for layout in LAYOUTS:
        part = few.repeated(split_by_layout(few.short, layout))
        assert part is not None, layout
        assert wired(part) == wired(split_by_layout(graph, layout)), layout


def test_a_graph_with_its_blocks_repeated_is_the_graph() -> None:
    graph = deep(8)
    few = repeats_of(graph)
    again = few.repeated(few.short)
    assert wired(again) == wired(graph)
    assert [op.name for op in again.ops] == [op.name for op in graph.ops]


def test_an_engine_divides_the_blocks_once_and_answers_as_of_all() -> None:
    graph, layout = deep(10), Layout(tp=2)
    part = Engine().split(graph, layout)
    # Not one operator of it has been made.
    assert not isinstance(part.ops, tuple)
    assert wired(part) == wired(split_by_layout(graph, layout))


def test_nothing_is_left_out_of_few_blocks_or_where_the_loss_reads_them_all() -> None:
    assert repeats_of(deep(5)) is None
    assert repeats_of(deep(9, odd=True)) is None


def test_only_blocks_that_are_equal_are_left_out() -> None:
    class Uneven(Deep):
        def __init__(self) -> None:
            super().__init__(14)
            self.layers[3] = nn.Sequential(Attention(), Mlp(), Mlp())

    graph = trace_graph(Uneven(), torch.zeros(4, TOKENS, dtype=torch.long))
    few = repeats_of(graph)
    assert few.units == tuple(f"layers.{number}" for number in range(6, 12))
    part = few.repeated(split_by_layout(few.short, Layout(tp=2)))
    assert wired(part) == wired(split_by_layout(graph, Layout(tp=2)))


def test_a_degree_that_does_not_divide_is_refused_as_before() -> None:
    graph = deep(9)
    with pytest.raises(Exception, match=r"tp=3 does not divide") as refused:
        split_by_layout(graph, Layout(tp=3))
    with pytest.raises(type(refused.value)) as again:
        Engine().split(graph, Layout(tp=3))
    assert str(again.value) == str(refused.value)
