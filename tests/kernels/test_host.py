"""What a compiled step costs the host, and which operators keep it waiting for a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import estimator as est
from estimator.cache import Cache
from estimator.graph.ir.op_graph import OpGraph
from estimator.kernels.durations import structure_of
from estimator.kernels.host import awaited_ops, compiled_host_seconds
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


class Selecting(nn.Module):
    """A linear layer whose results are selected in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(8, 8), way

    def forward(self, rows: Tensor) -> Tensor:
        mask = rows > 0
        if self.way == "number":
            return self.layer(rows) * int(mask.sum())
        made: Tensor = self.layer(rows)
        if self.way == "mask":
            return made[mask]
        if self.way == "index":
            return made[torch.arange(4)]
        if self.way == "repeated":
            return made.repeat_interleave(torch.full((len(rows),), 2), dim=0)
        if self.way == "filled":
            made = made.clone()
            made[mask] = 0.0
        return made


def waiting(way: str, target: str = "cuda") -> list[str]:
    graph = est.trace_model(Selecting(way), torch.randn(4, 8), target=target)  # type: ignore[arg-type]
    structure = structure_of(graph, Cache(1 << 20))
    return [graph.ops[op].call.target for op in awaited_ops(structure)]


@pytest.mark.parametrize(
    ("way", "found"),
    [
        ("number", ["aten._local_scalar_dense.default"]),
        # autograd finds the places of the mask once more to put gradients there
        ("mask", ["aten.index.Tensor", "aten.index_put.default"]),
        ("repeated", ["aten.repeat_interleave.Tensor"]),
        ("index", []),
        ("filled", []),
        ("not at all", []),
    ],
)
def test_a_value_in_python_or_a_shape_by_values_is_waited_for(way: str, found: list[str]) -> None:
    assert waiting(way) == found


def test_on_cpus_nothing_is_waited_for() -> None:
    assert waiting("number", "cpu") == []


def test_an_estimate_says_what_waiting_costs() -> None:
    graphs = [
        est.trace_model(Selecting(way), torch.randn(4, 8), target="cuda")
        for way in ("not at all", "number")
    ]
    plain, waits = (est.estimate(graph, "1x1:a100-sxm-80gb") for graph in graphs)
    found = [line for line in waits.assumptions if "waits for the device once" in line]
    assert len(found) == 1
    assert "aten._local_scalar_dense" in found[0]
    assert not [line for line in plain.assumptions if "waits for the device" in line]
    assert waits.step_time_s > plain.step_time_s


class Counting(nn.Module):
    """Asks how many numbers are positive, then computes for long."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Parameter(torch.zeros(16384, 2048))
        self.layers = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8)))

    def forward(self, rows: Tensor) -> Tensor:
        count = int((rows > 0).sum())
        made: Tensor = self.layers(self.state * count) * rows.sum()
        return made


def test_waiting_that_costs_next_to_nothing_is_not_said() -> None:
    graph = est.trace_model(Counting(), torch.randn(4, 8), target="cuda")
    found = est.estimate(graph, "1x1:a100-sxm-80gb")
    assert not [line for line in found.assumptions if "waits for the device" in line]
