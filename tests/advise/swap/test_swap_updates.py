"""Updates as gradients are ready: where they may be, what they save; training is the same."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from plan_flaws import plan_flaws
from torch import Tensor, nn

import estimator as est
from estimator.advise.swap.problem import (
    SwapProblem,
    Updates,
    swap_problem,
    swap_problems,
    why_at_the_end,
)
from estimator.advise.swap.search import pareto, plan_within
from estimator.errors import WorkloadError
from estimator.estimates.estimate import Estimate
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.trace.trace import trace_graph
from estimator.integrations.swap.apply_plan import MemoryPlan
from estimator.report.sections import plans_section
from tests.advise.swap.swap_problems import link
from tests.synthetic import Machine

LAYERS = 3


def model() -> nn.Module:
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers)


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return trace_graph(model(), torch.randn(32, 64), optimizer="adamw")


def answer_of(graph: OpGraph) -> Estimate:
    return est.estimate(graph, "1x1:synthetic", profile=Machine(devices=1).profile())


LINKS: dict[str, Any] = {"d2h": link("d2h", 4e9), "h2d": link("h2d", 4e9)}


def problem_of(graph: OpGraph, updates: Updates) -> SwapProblem:
    return swap_problem(answer_of(graph), updates=updates, **LINKS)


def test_nobody_reads_a_parameter_after_its_update(graph: OpGraph) -> None:
    problem = problem_of(graph, "ready")
    for tensor in problem.tensors:
        if tensor.kind == "parameter":
            (update,) = tensor.writers
            assert tensor.accesses[-1] == update
            assert tensor.accesses[-2] < update
    # Some are updated before the backward pass is through.
    firsts = [op for op, number in enumerate(problem.order) if number < 0]
    assert firsts[0] < problem.ops - len(firsts)
    # A plan that is run has its updates at the end.
    found = plan_within(problem, problem.vanilla_bytes)
    with pytest.raises(WorkloadError, match="as gradients are ready"):
        MemoryPlan(graph=graph, problem=problem, plan=found.plan)


def test_what_is_compared_with_is_the_step_with_its_updates_at_the_end(graph: OpGraph) -> None:
    plain, ready = swap_problems(answer_of(graph), **LINKS)
    assert ready.vanilla_bytes == plain.vanilla_bytes
    assert ready.vanilla_s == plain.vanilla_s
    # Each update of a parameter is a call of its own.
    assert ready.op_s.sum() > plain.op_s.sum()


def test_plans_take_the_updates_that_save_more(graph: OpGraph) -> None:
    """Gradients and moments of a layer are gone when those of the next one come."""
    problems = swap_problems(answer_of(graph), **LINKS)
    plans = pareto(*problems, budgets=6)
    assert {plan.problem.updates for plan in plans} >= {"ready"}
    assert plans[-1].played.peak_bytes <= pareto(problems[0], budgets=6)[-1].played.peak_bytes
    for plan in plans:
        assert plan_flaws(plan.problem, plan.plan, plan.played) == []
    words = " ".join(plans_section(answer_of(graph), plans).sentences)
    assert "register_post_accumulate_grad_hook" in words


@pytest.mark.parametrize("ratio", [0.9, 0.7, 0.5])
def test_plans_for_updates_as_ready_are_sound(graph: OpGraph, ratio: float) -> None:
    problem = problem_of(graph, "ready")
    found = plan_within(problem, int(ratio * problem.vanilla_bytes))
    assert plan_flaws(problem, found.plan, found.played) == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"clip_grad_norm": True}, "clipped"),
        ({"grad_scaler": True}, "scaler"),
        ({"optimizer": "lamb"}, "lamb"),
    ],
)
def test_what_needs_all_gradients_keeps_updates_at_the_end(
    graph: OpGraph, changes: dict[str, Any], word: str
) -> None:
    answer = answer_of(replace(graph, **changes))
    assert word in str(why_at_the_end(answer.plan.kinds[0].program.bound.graph))
    problems = swap_problems(answer, **LINKS)
    assert [problem.updates for problem in problems] == ["end"]
    plans = pareto(*problems, budgets=2)
    assert word in " ".join(plans_section(answer, plans).sentences)
    with pytest.raises(WorkloadError, match=word):
        swap_problem(answer, updates="ready", **LINKS)


def test_a_script_that_does_as_it_is_told_trains_the_same() -> None:
    """An optimizer for each parameter, stepped in its hook: the same bits as a step at the end."""
    torch.manual_seed(0)
    one = model()
    other = copy.deepcopy(one)
    whole = torch.optim.AdamW(one.parameters())
    own = {parameter: torch.optim.AdamW([parameter]) for parameter in other.parameters()}

    def update(parameter: Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in other.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(3):
        batch = torch.randn(8, 64)
        one(batch).sum().backward()
        whole.step()
        whole.zero_grad()
        other(batch).sum().backward()
        assert all(parameter.grad is None for parameter in other.parameters())
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
