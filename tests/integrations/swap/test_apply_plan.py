"""A plan that runs: the same gradients and buffers bit for bit, and the peak that was planned."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import estimator as est
from estimator.advise.swap.plan import Recompute, Swap, SwapPlan, gaps_of, recipe
from estimator.advise.swap.problem import SwapProblem, swap_problem
from estimator.advise.swap.search import Means, plan_within
from estimator.errors import WorkloadError
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.trace.trace import trace_graph
from estimator.integrations.swap.apply_plan import MemoryPlan, apply_plan
from estimator.integrations.swap.planned_storages import CudaStreams, PinnedHost
from tests.advise.swap.swap_problems import link
from tests.graph.memory.test_memory import live_peak_bytes
from tests.synthetic import Machine

MOVED = Means(recompute=False, kinds=("activation",))


class Squared(nn.Module):
    """A model whose output is its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Tensor) -> Tensor:
        return self.model(batch).square().mean()


def convolutional() -> tuple[nn.Module, Tensor]:
    """Batch norms, ReLUs in place, dropout: what makes recomputing delicate."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (8, 16, 16, 16):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width)]
        layers += [nn.ReLU(inplace=True)]
        channels = width
    layers += [nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(channels * 64, 10)]
    return Squared(nn.Sequential(*layers)), torch.randn(16, 3, 16, 16)


def feed_forward() -> tuple[nn.Module, Tensor]:
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
    return Squared(nn.Sequential(*layers)), torch.randn(512, 64)


class Attention(nn.Module):
    """One whose backward pass makes views of what the forward pass left."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.out = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, batch: Tensor) -> Tensor:
        for _ in range(3):
            weights = self.queries(batch) @ self.keys(batch).transpose(1, 2)
            batch = batch + self.out(weights.softmax(-1) @ batch)
        return batch


def attention() -> tuple[nn.Module, Tensor]:
    return Squared(Attention()), torch.randn(8, 48, 32)


class Recurrent(nn.Module):
    """One whose layer leaves a workspace of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.LSTM(32, 32, batch_first=True), nn.Linear(32, 32)

    def forward(self, batch: Tensor) -> Tensor:
        return self.out(self.layer(batch)[0])


def problem_of(model: nn.Module, batch: Any) -> tuple[OpGraph, SwapProblem]:
    graph = trace_graph(model, batch, loss=lambda value, _batch: value, optimizer="adamw")
    answer = est.estimate(graph, "1x1:synthetic", profile=Machine(devices=1).profile())
    return graph, swap_problem(answer, d2h=link("d2h", 4e9), h2d=link("h2d", 4e9))


@pytest.mark.parametrize("build", [convolutional, feed_forward, attention])
@pytest.mark.parametrize("means", ["swap", "recompute", "both"])
def test_gradients_and_buffers_are_the_same_bit_for_bit(
    build: Callable[[], tuple[nn.Module, Tensor]], means: str
) -> None:
    torch.manual_seed(0)
    model, batch = build()
    graph, problem = problem_of(model, batch)
    allowed = Means(swap=means != "recompute", recompute=means != "swap", kinds=("activation",))
    found = plan_within(problem, int(0.6 * problem.vanilla_bytes), means=allowed)
    assert found.plan.swaps or found.plan.recomputes
    plain, planned = copy.deepcopy(model), copy.deepcopy(model)
    plan = MemoryPlan(graph=graph, problem=problem, plan=found.plan)
    with apply_plan(plan, planned):
        # Two steps: what the first one leaves must not disturb the second.
        for _ in range(2):
            expected, got = run(plain, batch), run(planned, batch)
            assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    for first, second in zip(plain.buffers(), planned.buffers(), strict=True):
        assert torch.equal(first, second)


def run(model: nn.Module, batch: Any) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(batch).backward()
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


@pytest.mark.parametrize("steps_before", [0, 1])
def test_the_measured_peak_falls_as_planned(steps_before: int) -> None:
    torch.manual_seed(0)
    model, batch = convolutional()
    graph, problem = problem_of(model, batch)
    found = plan_within(problem, int(0.7 * problem.vanilla_bytes), means=MOVED)
    assert found.played.saved_ratio > 0.2
    plan = MemoryPlan(graph=graph, problem=problem, plan=found.plan)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(batch).backward()

    step()
    without = live_peak_bytes(step, model)
    model.zero_grad(set_to_none=True)
    with apply_plan(plan, model):
        for _ in range(steps_before):
            step()
        under = live_peak_bytes(step, model)
    saved = problem.vanilla_bytes - found.played.peak_bytes
    assert without - under == pytest.approx(saved, rel=0.05)


def follows_operators() -> bool:
    return _get_current_dispatch_mode() is not None


def test_later_steps_are_followed_by_what_autograd_saves() -> None:
    model, batch = convolutional()
    graph, problem = problem_of(model, batch)
    means = Means(kinds=("activation",))
    found = plan_within(problem, int(0.6 * problem.vanilla_bytes), means=means)
    with apply_plan(MemoryPlan(graph=graph, problem=problem, plan=found.plan), model):
        assert follows_operators()
        run(model, batch)
        run(model, batch)
        assert not follows_operators()


def test_later_steps_compute_again_from_their_own_batch() -> None:
    model, batch = feed_forward()
    graph, problem = problem_of(model, batch)
    # The first layer's output, which is made of the batch.
    gap = next(gap for gap in gaps_of(problem, ["activation"]) if gap.after <= 2)
    ops = recipe(problem, gap.tensor, after=gap.after, before=gap.use) or ()
    again = Recompute(tensor=gap.tensor, after=gap.after, before=gap.use, ops=ops)
    plain, planned = copy.deepcopy(model), copy.deepcopy(model)
    plan = MemoryPlan(graph=graph, problem=problem, plan=SwapPlan(recomputes=(again,)))
    with apply_plan(plan, planned):
        run(planned, batch)
        other = torch.randn_like(batch)
        got = run(planned, other)
        assert not follows_operators()
    assert all(torch.equal(a, b) for a, b in zip(run(plain, other), got, strict=True))


class Skipping(nn.Module):
    """One whose later steps may leave out a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.used = 4

    def forward(self, batch: Tensor) -> Tensor:
        for layer in self.layers[: self.used]:
            batch = layer(batch).relu()
        return batch.square().mean()


def test_a_later_step_that_does_something_else_is_refused() -> None:
    model, batch = Skipping(), torch.randn(64, 32)
    graph, problem = problem_of(model, batch)
    found = plan_within(problem, int(0.9 * problem.vanilla_bytes), means=MOVED)
    plan = MemoryPlan(graph=graph, problem=problem, plan=found.plan)

    def train() -> None:
        with apply_plan(plan, model):
            for model.used in (4, 4, 2):
                run(model, batch)

    with pytest.raises(WorkloadError, match="left the first one"):
        train()
    assert model.used == 2


class Sums(nn.Module):
    """One whose first tensor is read again by a sum, for which autograd saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, batch: Tensor) -> Tensor:
        kept = self.first(batch) + batch
        return (self.second(batch).relu() + kept).square().mean()


def test_what_autograd_does_not_save_is_moved_by_following_operators() -> None:
    model, batch = Sums(), torch.randn(64, 32)
    graph, problem = problem_of(model, batch)
    kept = next(t for t in problem.tensors if t.kind == "activation" and len(t.accesses) > 1)
    first, use = kept.accesses[:2]
    assert problem.repeatable[use], "read again in the forward pass"
    swap = Swap(tensor=kept.number, after=first, free_before=first + 1, fetch_before=use, use=use)
    plain, planned = copy.deepcopy(model), copy.deepcopy(model)
    plan = MemoryPlan(graph=graph, problem=problem, plan=SwapPlan(swaps=(swap,)))
    with apply_plan(plan, planned):
        for _ in range(2):
            expected, got = run(plain, batch), run(planned, batch)
            assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
        assert follows_operators()


def test_another_model_is_refused() -> None:
    model, batch = feed_forward()
    graph, problem = problem_of(model, batch)
    plan = MemoryPlan(graph=graph, problem=problem, plan=SwapPlan())
    other = Squared(nn.Sequential(nn.Linear(64, 64), nn.Tanh()))
    with pytest.raises(WorkloadError, match="left the traced one"), apply_plan(plan, other):
        other(batch).backward()


def test_a_plan_for_gpus_needs_the_model_there() -> None:
    model, batch = feed_forward()
    graph, problem = problem_of(model, batch)
    plan = MemoryPlan(graph=replace(graph, target="cuda"), problem=problem, plan=SwapPlan())
    with (
        pytest.raises(WorkloadError, match="a step on cuda, found parameters on cpu"),
        apply_plan(plan, model),
    ):
        raise AssertionError("a step began")


def test_a_plan_that_moves_more_than_activations_is_refused() -> None:
    model, batch = feed_forward()
    graph, problem = problem_of(model, batch)
    parameter = next(t.number for t in problem.tensors if t.kind == "parameter")
    swap = Swap(tensor=parameter, after=0, free_before=1, fetch_before=2, use=3)
    with pytest.raises(WorkloadError, match="activations alone"):
        MemoryPlan(graph=graph, problem=problem, plan=SwapPlan(swaps=(swap,)))


def test_what_a_recurrent_layer_leaves_for_its_backward_is_computed_again() -> None:
    model, batch = Squared(Recurrent()), torch.randn(8, 48, 32)
    graph, problem = problem_of(model, batch)
    gap = max(gaps_of(problem, ["activation"]), key=lambda each: each.size_bytes)
    (op,) = recipe(problem, gap.tensor, after=gap.after, before=gap.use) or ()
    assert "mkldnn_rnn_layer" in problem.names[op]
    again = Recompute(tensor=gap.tensor, after=gap.after, before=gap.use, ops=(op,))
    planned = copy.deepcopy(model)
    plan = MemoryPlan(graph=graph, problem=problem, plan=SwapPlan(recomputes=(again,)))
    with apply_plan(plan, planned):
        got = run(planned, batch)
    assert all(torch.equal(a, b) for a, b in zip(run(model, batch), got, strict=True))


class LazyStream:
    """A stream that copies at the last moment: when somebody waits for it.

    `is_behind` while something that operators wrote may not be waited for.
    """

    def __init__(self) -> None:
        self.left: list[tuple[Tensor, Tensor]] = []
        self.is_behind = True

    def wait_stream(self, _operators: Any) -> None:
        self.is_behind = False

    def record_event(self) -> LazyEvent:
        return LazyEvent(self, list(self.left))


class LazyEvent:
    def __init__(self, stream: LazyStream, before: list[tuple[Tensor, Tensor]]) -> None:
        self.stream, self.before = stream, before

    def run(self) -> None:
        while self.before:
            copy = self.before.pop(0)
            if any(copy is each for each in self.stream.left):
                self.stream.left = [each for each in self.stream.left if each is not copy]
                copy[0].copy_(copy[1])


class Operators:
    """The stream that operators run on, at once; copies run when it waits for them."""

    def __init__(self, *, waits: bool) -> None:
        self.waits = waits

    def wait_event(self, event: LazyEvent) -> None:
        if self.waits:
            event.run()

    def wait_stream(self, stream: LazyStream) -> None:
        stream.record_event().run()


class LazyStreams(CudaStreams):
    """Streams of a device that has its operators on the CPU."""

    def __init__(self, *, waits: bool = True) -> None:
        self.operators = Operators(waits=waits)
        self.copies = 0

    def current(self) -> Any:
        return self.operators

    def create(self) -> Any:
        return LazyStream()

    def pinned(self, size_bytes: int) -> Tensor:
        return torch.full((size_bytes,), 0xFF, dtype=torch.uint8)

    def copy(self, stream: LazyStream, target: Tensor, source: Tensor) -> None:
        assert not stream.is_behind, "the copy may come before the operators that it follows"
        stream.is_behind = True
        target.fill_(0xFF)  # NaN, until the copy has run
        stream.left.append((target, source))
        self.copies += 1


def planned_gradients(streams: LazyStreams) -> tuple[list[Tensor], list[Tensor], int]:
    """(without a plan, under one that swaps, swaps)."""
    torch.manual_seed(0)
    model, batch = convolutional()
    graph, problem = problem_of(model, batch)
    means = Means(recompute=False, kinds=("activation",))
    found = plan_within(problem, int(0.6 * problem.vanilla_bytes), means=means)
    plan = MemoryPlan(graph=graph, problem=problem, plan=found.plan)
    other = copy.deepcopy(model)
    with apply_plan(plan, other, host=PinnedHost(streams)):
        got = run(other, batch)
    return run(model, batch), got, len(found.plan.swaps)


def test_gradients_are_the_same_where_copies_end_at_the_last_moment() -> None:
    streams = LazyStreams()
    expected, got, swaps = planned_gradients(streams)
    assert swaps > 0
    assert streams.copies == 2 * swaps
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_operators_that_did_not_wait_would_read_what_is_not_back() -> None:
    expected, got, _ = planned_gradients(LazyStreams(waits=False))
    assert not all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
