"""Which operators keep the host waiting for a GPU, and what that costs a step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import estimator as est
from estimator.cache import Cache
from estimator.kernels.durations import structure_of
from estimator.kernels.host import awaited_ops


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
