"""Machines that cannot run a step are refused, whatever it would take."""

from __future__ import annotations

from dataclasses import replace

import pytest

import estimator as est
from tests.synthetic import perceptron

GRAPH = replace(perceptron([256, 256]), target="cuda")


@pytest.mark.parametrize("execution", ["compiled", "cuda-graphs"])
@pytest.mark.parametrize(
    # Compute capabilities 3.7, 6.0, 6.1 and 6.1 (NVIDIA's list of CUDA GPUs).
    "machine",
    ["k80", "p100-sxm", "p4", "gtx-1080-roce"],
)
def test_chips_below_capability_7_cannot_run_compiled_steps(machine: str, execution: str) -> None:
    graph = replace(GRAPH, execution=execution)
    said = f"'{machine}' has compute capability .*, and torch.compile needs 7.0"
    with pytest.raises(est.EstimatorError, match=said):
        est.estimate(graph, f"1x1:{machine}")
    with pytest.raises(est.EstimatorError, match=f"row 1: {said}"):
        est.estimate_many(graph, ["1x1:t4", f"1x1:{machine}"], strict=True)
    assert est.estimate(GRAPH, f"1x1:{machine}").mode == "fp32"


@pytest.mark.parametrize("machine", ["v100-sxm", "mi250x", "h100-sxm"])
def test_chips_that_torch_compile_serves_run_compiled_steps(machine: str) -> None:
    graph = replace(GRAPH, execution="compiled")
    assert est.estimate(graph, f"1x1:{machine}").mode == "fp32, compiled"


def test_a_module_is_traced_for_the_devices_of_its_allocation() -> None:
    import torch

    model, batch = torch.nn.Linear(3, 2), torch.randn(4, 3)
    answer = est.estimate(model, "1x2:h100-sxm", batch=batch)
    assert answer.plan.members.table.graph.target == "cuda"
