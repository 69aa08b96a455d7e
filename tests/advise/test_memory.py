"""The memory of a step over time, as the command shows it, beside what the estimate says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import estimator as est
from estimator.advise.memory import memory_of
from estimator.graph.ir.op_graph import OpGraph
from tests.conftest import make_small_profile
from tests.graph.partition.test_split_context import graph_of
from tests.graph.partition.test_split_experts import GRAPH as EXPERTS
from tests.graph.partition.test_stages import traced

DENSE, STAGES, EXPERTS_ON_GPUS = (
    replace(graph, target="cuda") for graph in (graph_of(), traced(8), EXPERTS)
)
# Every kind of the strategies, and those that keep shards in other ways.
EVERY = ("ddp", "zero1", "distributed-optimizer", "zero2", "fsdp", "fsdp:no_reshard", "ps:1")
OF_STAGES = ("ddp", "zero1", "distributed-optimizer", "fsdp:no_reshard")
GRID = [
    *[(DENSE, s, layout) for s in (*EVERY, "fsdp:offload") for layout in (None, "dp=*")],
    *[(DENSE, s, layout) for s in EVERY for layout in ("tp=4,dp=1", "tp=2,dp=*", "cp=2,dp=*")],
    *[(EXPERTS_ON_GPUS, s, layout) for s in ("ddp", "fsdp") for layout in ("ep=4", "cp=2,ep=2")],
    *[
        (STAGES, s, layout)
        for s in OF_STAGES
        for layout in ("pp=4,dp=1", "pp=2,dp=*", "pp=2,schedule=interleaved:2,dp=*")
    ],
]


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(("graph", "strategy", "layout"), GRID)
def test_the_highest_level_is_the_peak_of_the_estimate(
    graph: OpGraph, strategy: str, layout: str | None, micro_batches: int
) -> None:
    asked = {"strategy": strategy, "layout": layout, "accumulation_steps": micro_batches}
    answer = est.estimate(graph, "1x4:h100-sxm", **asked)  # type: ignore[arg-type]
    curve = memory_of(answer).curve
    # Kinds that are divided over ranks are rounded up to whole bytes each, the peak once.
    assert curve.peak_bytes == pytest.approx(answer.peak_memory_bytes, abs=4)
    assert all((levels >= 0).all() for levels in curve.levels.values())


def test_a_device_of_several_cores_holds_blocked_copies_of_what_a_convolution_reads() -> None:
    layer = nn.Conv2d(24, 24, 1, bias=False)
    graph = est.trace_model(layer, torch.ones(6, 24, 80, 80), optimizer="sgd")
    one = make_small_profile()
    two = replace(one, devices=tuple(replace(d, cores=(0, 1)) for d in one.devices))
    found, more = (est.estimate(graph, "1x1:local", profile=each) for each in (one, two))
    # One thread multiplies matrices as they are. Several go through oneDNN, which holds image,
    # gradient and weight in blocks of 16 channels, of which the last is the weight's gradient.
    image_bytes, weight_bytes = 6 * 24 * 80 * 80 * 4, 24 * 24 * 4
    blocked_bytes = 2 * image_bytes * 32 // 24 + 32 * 32 * 4
    assert more.peak_memory_bytes - found.peak_memory_bytes == blocked_bytes - weight_bytes
    assert memory_of(more).curve.peak_bytes == more.peak_memory_bytes
