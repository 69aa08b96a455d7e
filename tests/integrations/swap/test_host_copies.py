"""Streams of copies beside a step: what the operators wait for, played without a GPU."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from estimator.advise.swap.search import Means, plan_within
from estimator.integrations.swap.apply_plan import MemoryPlan, apply_plan
from estimator.integrations.swap.planned_storages import CudaStreams, PinnedHost
from tests.integrations.swap.test_apply_plan import Squared, convolutional, problem_of, run


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
    wrapped = Squared(model)
    graph, problem = problem_of(wrapped, batch)
    means = Means(recompute=False, kinds=("activation",))
    found = plan_within(problem, int(0.6 * problem.vanilla_bytes), means=means)
    plan = MemoryPlan(graph=graph, problem=problem, plan=found.plan)
    other = copy.deepcopy(wrapped)
    with apply_plan(plan, other, host=PinnedHost(streams)):
        got = run(other, batch)
    return run(wrapped, batch), got, len(found.plan.swaps)


def test_gradients_are_the_same_where_copies_end_at_the_last_moment() -> None:
    streams = LazyStreams()
    expected, got, swaps = planned_gradients(streams)
    assert swaps > 0
    assert streams.copies == 2 * swaps
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_operators_that_did_not_wait_would_read_what_is_not_back() -> None:
    expected, got, _ = planned_gradients(LazyStreams(waits=False))
    assert not all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
