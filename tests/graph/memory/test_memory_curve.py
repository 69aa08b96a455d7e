"""Memory over a step: by hand, and its maximum beside the peak that is computed on its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.memory.peak import by_module, live_tensors, tensors_of
from estimator.graph.memory.step import memory_alone
from estimator.graph.trace.trace import trace_graph
from tests.graph.memory.test_memory import KILO, over_step, two_layers
from tests.graph.memory.test_step_memory import three_layers


def convolutional() -> OpGraph:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)
    )
    graph = trace_graph(model, torch.randn(4, 3, 8, 8), optimizer="adam")
    return replace(graph, target="cuda")


def test_levels_by_hand() -> None:
    graph = two_layers()
    curve = memory_alone(graph.at()).curve()
    kilobytes = {kind: (each / KILO).tolist() for kind, each in curve.levels.items()}
    # Parameters of 1 + 2 and an input of 4 throughout.
    assert kilobytes["parameters"] == [3.0] * (len(graph.ops) + 1)
    assert kilobytes["buffers and inputs"] == [4.0] * (len(graph.ops) + 1)
    # h (8) is made by op 0 and last read by op 4, y (16) by op 2 and 3: forward for backward. The
    # gradients of y (16) and of h (8) are not; those of the parameters (2 and 1) stay.
    assert kilobytes["activations"] == [8, 8, 24, 24, 8, 0, 0, 0]
    assert kilobytes["temporaries"] == [0, 0, 0, 16, 16, 24, 8, 0]
    assert kilobytes["gradients"] == [0, 0, 0, 0, 2, 2, 3, 3]
    assert curve.peak_at == 3
    assert curve.peak_bytes == (3 + 4 + 24 + 16) * KILO


@pytest.mark.parametrize("merging", [False, True])
@pytest.mark.parametrize("text", ["ddp", "ddp:view", "ddp:reduce=fp16"])
def test_the_maximum_is_the_peak_of_a_replica(merging: bool, text: str) -> None:
    found = over_step(convolutional(), text, batch=16, merging=merging)
    assert found.curve().peak_bytes == found.peaks().total_bytes(1)


@pytest.mark.parametrize("text", ["zero1", "zero1:master", "zero2:bucket=4096", "fsdp", "ps:1"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("shards", [2, 8])
def test_the_maximum_is_the_peak_of_a_shard(text: str, micro_batches: int, shards: int) -> None:
    graph = replace(three_layers(), precision="bf16", optimizer="adam")
    found = over_step(graph, text, micro_batches=micro_batches)
    curve = found.curve(shards)
    # Kinds are rounded up to whole bytes each, the peak once.
    assert abs(curve.peak_bytes - found.peaks().total_bytes(shards)) <= 4
    assert all((levels >= 0).all() for levels in curve.levels.values())


@pytest.mark.parametrize("text", ["fsdp:param=bf16", "fsdp:offload", "fsdp:param=bf16,offload"])
def test_the_maximum_is_the_peak_of_a_rank_alone_whose_shards_are_kept_apart(text: str) -> None:
    graph = replace(three_layers(), precision="bf16", optimizer="adam")
    found = over_step(graph, text, merging=False)
    assert abs(found.curve().peak_bytes - found.peaks().total_bytes(1)) <= 4


def test_tensors_alive_at_an_op_add_up_to_its_levels() -> None:
    graph = convolutional()
    bound = graph.at(64)
    curve = memory_alone(bound).curve()
    for place in range(len(graph.ops) + 1):
        found = live_tensors(tensors_of(bound), place)
        for kind in ("parameters", "gradients", "activations"):
            held = sum(tensor.size_bytes for tensor in found if tensor.kind == kind)
            assert held == curve.at(place)[kind], (place, kind)


def test_modules_are_listed_by_what_they_hold() -> None:
    graph = convolutional()
    found = by_module(live_tensors(tensors_of(graph.at(64)), 1), depth=1)
    # The convolution's output, 64 x 8 x 6 x 6 floats, beside its 3 x 3 x 3 x 8 weights and 8
    # biases, each in blocks of 512 bytes.
    assert found["0"] == 64 * 8 * 36 * 4 + 1024 + 512
    assert sum(found.values()) == sum(
        tensor.size_bytes for tensor in live_tensors(tensors_of(graph.at(64)), 1)
    )
