"""Updates among the operators of a step: no parameter is read too late, slices are all of it."""

from __future__ import annotations

import pytest
import torch
from swap.checker import plan_flaws
from swap.steps import UpdateSchedule
from torch import nn

import estimator as est
from estimator.advise.swap.problem import SwapProblem, swap_problem
from estimator.advise.swap.search import plan_within
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.trace.trace import trace_graph
from tests.advise.swap.swap_problems import link
from tests.synthetic import Machine


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return trace_graph(nn.Sequential(*layers), torch.randn(32, 64), optimizer="adamw")


def problem_of(graph: OpGraph, updates: UpdateSchedule) -> SwapProblem:
    answer = est.estimate(graph, "1x1:synthetic", profile=Machine(devices=1).profile())
    return swap_problem(answer, d2h=link("d2h", 4e9), h2d=link("h2d", 4e9), updates=updates)


@pytest.mark.parametrize("place", ["ready", "paced"])
def test_nobody_reads_a_parameter_after_its_update(graph: OpGraph, place: str) -> None:
    problem = problem_of(graph, UpdateSchedule(place=place))  # type: ignore[arg-type]
    for tensor in problem.tensors:
        if tensor.kind == "parameter":
            (update,) = tensor.writers
            assert tensor.accesses[-1] == update
            assert tensor.accesses[-2] < update
    # Some are updated before the backward pass is through.
    firsts = [op for op, number in enumerate(problem.order) if number < 0]
    assert firsts[0] < problem.ops - len(firsts)


def test_slices_are_the_whole_of_a_parameter(graph: OpGraph) -> None:
    # 64 x 64 floats are 16 KiB: four slices of 4 KiB, each with its two moments.
    problem = problem_of(graph, UpdateSchedule(place="paced", sub_group_bytes=4096))
    weights = [t for t in problem.tensors if t.kind == "parameter" and t.size_bytes == 16384]
    assert [len(weight.writers) for weight in weights] == [4, 4, 4]
    for weight in weights:
        moments = [t for t in problem.tensors if t.kind == "state" and t.name == weight.name]
        assert [moment.size_bytes for moment in moments] == [4096] * 8
        assert {moment.accesses for moment in moments} == {(op,) for op in weight.writers}
        gradient = next(
            t for t in problem.tensors if t.kind == "gradient" and t.name == weight.name
        )
        assert gradient.dies == weight.writers[-1]


def test_where_updates_lie_changes_neither_the_time_nor_what_is_compared_with(
    graph: OpGraph,
) -> None:
    plain = problem_of(graph, UpdateSchedule())
    for updates in (
        UpdateSchedule(place="ready"),
        UpdateSchedule(place="paced", sub_group_bytes=4096),
    ):
        other = problem_of(graph, updates)
        assert other.vanilla_bytes == plain.vanilla_bytes
        assert other.vanilla_s == pytest.approx(plain.vanilla_s)


@pytest.mark.parametrize("ratio", [0.9, 0.7, 0.5])
def test_plans_for_sliced_updates_are_sound(graph: OpGraph, ratio: float) -> None:
    problem = problem_of(graph, UpdateSchedule(place="paced", sub_group_bytes=4096))
    found = plan_within(problem, int(ratio * problem.vanilla_bytes))
    assert plan_flaws(problem, found.plan, found.played) == []
