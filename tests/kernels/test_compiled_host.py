"""Check what a compiled step costs the host, and that compiling pays where the host was slow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import estimator as est
from estimator.graph.ir.op_graph import OpGraph
from estimator.kernels.host import compiled_host_seconds
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import HostCost, Provenance, UpdateCost

HOST = HostCost(
    forward_op_s=5e-6,
    forward_view_s=3e-6,
    backward_op_s=2e-6,
    bare_op_s=4e-6,
    module_call_s=3e-6,
    step_s=1e-4,
    provenance=Provenance(source="measured"),
)


def traced(compiled: Any, **options: Any) -> OpGraph:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return est.trace_model(
        layer, torch.randn(4, 6, 16), compiled=compiled, **{"target": "cuda", **options}
    )


def test_a_compiled_step_pays_two_calls_and_a_launch_for_each_kernel() -> None:
    graph = traced(True)
    # Two calls of 40 µs, an empty step, launches of 1.5 bare operators, a hand-over per gradient.
    expected_s = 2 * 4e-5 + 1e-4 + len(graph.ops) * 1.5 * 4e-6 + len(graph.parameters) * 2e-6
    assert compiled_host_seconds(graph, HOST).sum() == pytest.approx(expected_s)


def test_cuda_graphs_pay_two_replays_whatever_the_number_of_kernels() -> None:
    graph = traced("cuda-graphs")
    # 170 µs for each replay come on top of the two calls.
    expected_s = 2 * (4e-5 + 1.7e-4) + 1e-4 + len(graph.parameters) * 2e-6
    assert compiled_host_seconds(graph, HOST).sum() == pytest.approx(expected_s)


def test_on_a_cpu_calling_a_kernel_is_part_of_its_own_time() -> None:
    graph = traced(True, target="cpu")
    expected_s = 2 * 4e-5 + 1e-4 + len(graph.parameters) * 2e-6
    assert compiled_host_seconds(graph, HOST).sum() == pytest.approx(expected_s)


def test_a_step_of_small_kernels_gets_faster_when_compiled_and_its_parts_still_sum() -> None:
    answers = [
        est.estimate(traced(compiled), "1x2:a100-sxm-80gb")
        for compiled in (False, True, "cuda-graphs")
    ]
    assert answers[1].step_time_s < answers[0].step_time_s
    for answer in answers:
        end_s = max(span.start_s + span.duration_s for span in answer.timeline.spans)
        assert answer.breakdown.total_s == pytest.approx(end_s)
    assert [answer.mode for answer in answers] == ["fp32", "fp32, compiled", "fp32, cuda-graphs"]


def test_a_sharded_update_of_a_small_model_takes_no_longer_than_a_whole_one() -> None:
    # To issue it takes the host 1 ms, which is ahead by more; the device updates within a few µs.
    profile = load_profile("a100-sxm-80gb")
    cost = UpdateCost(
        optimizer="adamw",
        form="foreach",
        device="cuda",
        launch_s=1e-3,
        per_tensor_s=0.0,
        per_parameter_s=1e-11,
        lanes=((1.0, 64.0, 1e-3, 1e-6),),
        provenance=Provenance(source="measured"),
    )
    measured = replace(profile, updates=(cost,), host=HOST)
    graph = est.trace_model(nn.Linear(1024, 1024), torch.randn(4, 1024), target="cuda")
    whole, sharded = (
        est.estimate(
            graph, "1x2:a100-sxm-80gb", batch_per_gpu=65536, strategy=strategy, profile=measured
        )
        for strategy in ("ddp", "zero1")
    )
    assert whole.breakdown.update_s == pytest.approx(1e-11 * graph.parameter_count)
    assert sharded.breakdown.update_s <= whole.breakdown.update_s


def test_a_gradient_scaler_reads_and_writes_every_gradient_before_the_update() -> None:
    plain = traced(False, precision="fp16-amp")
    scaled = replace(plain, grad_scaler=True)
    one, two = (est.estimate(graph, "1x1:a100-sxm-80gb") for graph in (plain, scaled))
    added_s = two.breakdown.update_s - one.breakdown.update_s
    # A100 80 GB: 2039 GB/s at most; the host's six small operators take at least a µs each.
    assert added_s > plain.parameter_count * 8 / 2.039e12 + 6e-6
    assert two.step_time_s - one.step_time_s == pytest.approx(added_s)
    assert two.mode == "fp16-amp, gradient scaler"
