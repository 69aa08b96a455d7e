"""What of a graph is found with arrays, against the plain definition, operator by operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from estimator import OpGraph, trace_model
from estimator.errors import WorkloadError
from estimator.graph.ir.op_graph import job_content
from estimator.graph.ir.ops import GraphColumns
from estimator.graph.ir.structure import GraphStructure
from estimator.graph.partition.stages import split_points, stage_graphs
from tests.graph.partition.test_stages import traced


class Unequal(nn.Module):
    """Blocks of unlike widths, of which every second one is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8))
            for width in (8, 16, 8, 24)
        )

    def forward(self, state: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number % 2:
                more = torch.utils.checkpoint.checkpoint(layer, state, use_reentrant=False)
            else:
                more = layer(state)
            state = state + more
        return state.square().mean()


def graphs() -> list[OpGraph]:
    unequal = trace_model(Unequal(), torch.randn(4, 8))
    return [traced(), traced(6, tied=True), unequal]


@pytest.mark.parametrize("batch", [None, 4, 6, 32])
def test_a_batch_size_is_bound_by_distinct_calls_as_by_all(batch: int | None) -> None:
    for graph in graphs():
        found, plain = GraphStructure.of(graph).at(batch), graph.at(batch)
        assert found.batch == plain.batch
        assert found.calls == plain.calls
        assert found.specs == plain.specs


def test_a_batch_size_of_none_is_refused_by_both() -> None:
    with pytest.raises(WorkloadError, match="batch size must be at least 1, found 0"):
        GraphStructure.of(traced()).at(0)


def test_touches_are_those_of_every_kernel() -> None:
    for graph in graphs():
        structure = GraphStructure.of(graph)
        last: dict[int, int] = {}
        expected = set()
        for index, op in enumerate(graph.ops):
            if op.is_view:
                continue
            read = {int(structure.storage_of[value]) for value in op.inputs}
            written = {int(structure.storage_of[value]) for value in op.outputs} - read
            for storage in read | written:
                expected.add((index, storage, storage in read, last.get(storage, -1)))
            last.update(dict.fromkeys(read | written, index))
        touches = structure.touches
        columns = touches.op, touches.storage, touches.is_read, touches.previous
        found = list(zip(*(column.tolist() for column in columns), strict=True))
        assert len(found) == len(expected)
        assert set(found) == expected


def test_a_backward_pass_is_in_the_stage_of_its_module_and_of_what_it_reads() -> None:
    for graph in graphs():
        points = split_points(graph)[1:]
        stages = stage_graphs(graph, points)
        owner = {op: number for number, stage in enumerate(stages) for op in stage.ops}
        before = len(points)
        for index, op in enumerate(graph.ops):
            if op.phase == "backward":
                # Backward goes from the last stage to the first, and never returns.
                assert owner[index] <= before
                before = owner[index]
                for point in points:
                    if op.module.startswith(f"{point}."):
                        assert owner[index] <= points.index(point) + 1


def test_what_a_graph_wires_is_in_its_arrays() -> None:
    for graph in graphs():
        flow = GraphColumns.of(graph)
        for index, op in enumerate(graph.ops):
            own = flow.touched_by == index
            assert tuple(flow.touched[own & ~flow.is_made].tolist()) == op.inputs
            assert tuple(flow.touched[own & flow.is_made].tolist()) == op.outputs
            assert tuple(flow.held[flow.held_by == index].tolist()) == op.holds
            for value in op.outputs:
                first = next(n for n, each in enumerate(graph.ops) if value in each.outputs)
                assert flow.maker[value] == first


def content_traced(*, batch: int = 4, tokens: int = 8, width: int = 16, **options: Any) -> OpGraph:
    model = torch.nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
    return trace_model(model, torch.randn(batch, tokens, width), **options)


def fingerprint(graph: OpGraph) -> str:
    return job_content(graph).fingerprint


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return content_traced()


def test_one_model_at_two_batch_sizes_and_under_two_names_is_one_job(graph: OpGraph) -> None:
    again = replace(content_traced(batch=6), name="another name")
    assert again.batch != graph.batch
    assert fingerprint(again) == fingerprint(graph)


@pytest.mark.parametrize(
    "other",
    [{"tokens": 16}, {"width": 32}, {"optimizer": "sgd"}, {"precision": "bf16-amp"}],
    ids=lambda other: next(iter(other)),
)
def test_another_length_width_optimizer_or_precision_is_another_job(
    graph: OpGraph, other: dict[str, Any]
) -> None:
    assert fingerprint(content_traced(**other)) != fingerprint(graph)


def test_likeness_falls_with_what_differs(graph: OpGraph) -> None:
    content = job_content(graph)
    longer, wider = (
        job_content(content_traced(**other)) for other in ({"tokens": 16}, {"width": 32})
    )
    linear = trace_model(torch.nn.Linear(16, 16), torch.randn(4, 16))
    assert content.likeness(content) == pytest.approx(1.0)
    # The same operators on the same parameters.
    assert content.likeness(longer) == pytest.approx(1.0)
    assert content.likeness(job_content(linear)) < content.likeness(wider) < 1.0
    assert wider.likeness(content) == pytest.approx(content.likeness(wider))
    # 10 times the parameters: e times less alike, by definition.
    larger = replace(content, parameter_bytes=10 * content.parameter_bytes)
    assert content.likeness(larger) == pytest.approx(0.3679, abs=1e-4)
    assert content.likeness(replace(content, optimizer="sgd")) == pytest.approx(0.9)
