"""The event simulation of tasks by hand-worked cases, and what must hold of every play."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import estimator as est
from estimator.estimates.estimate import Estimate
from estimator.timeline.collectives.algorithms import Line
from estimator.timeline.collectives.costs import CollectiveModel, Corrections
from estimator.timeline.collectives.overlap import NO_OVERLAP, Overlap
from estimator.timeline.rank.rules import BucketQueue
from estimator.timeline.simulator.simulation import SimulatedStep, simulate
from estimator.timeline.simulator.tasks import (
    COMPUTE,
    NETWORK,
    REPLICATES,
    Span,
    Task,
    TaskList,
    play,
)
from tests.budgets import examples
from tests.synthetic import Machine, perceptron

FREE = Overlap()


def queue(
    ready_s: Sequence[Sequence[float]],
    total_s: Sequence[float],
    cost_s: Sequence[float],
    latency_s: Sequence[float] | None = None,
) -> list[Task]:
    """Collectives, each sent once all kinds of ranks have computed until it is ready."""
    tasks = TaskList()
    marks = np.array([[*ready, total] for ready, total in zip(ready_s, total_s, strict=True)])
    steps = np.diff(marks, axis=1, prepend=0.0)
    for number, alone_s in enumerate(cost_s):
        computed = tasks.add(COMPUTE, steps[:, number])
        wait_s = 0.0 if latency_s is None else latency_s[number]
        tasks.add(NETWORK, alone_s, computed, latency_s=wait_s)
    tasks.add(COMPUTE, steps[:, len(cost_s)])
    return tasks.tasks


def collectives(tasks: Sequence[Task], played: SimulatedStep) -> list[tuple[float, float]]:
    """(start, end) of every collective."""
    numbers = [number for number, task in enumerate(tasks) if task.lane == NETWORK]
    return [(played.start_s[n, 0], played.end_s[n, 0]) for n in numbers]


def test_perfect_overlap_exposes_only_what_comes_after_the_last_op() -> None:
    tasks = queue([[1.0, 3.0]], [3.0], [1.0, 0.5])
    played = simulate(tasks, FREE)
    assert collectives(tasks, played) == [(1.0, 2.0), (3.0, 3.5)]
    assert played.step_s == 3.5


def test_a_single_slot_makes_collectives_wait_for_each_other() -> None:
    tasks = queue([[1.0, 1.0]], [2.0], [2.0, 2.0])
    assert collectives(tasks, simulate(tasks, FREE)) == [(1.0, 3.0), (3.0, 5.0)]


def test_two_slots_share_the_rate_and_end_together() -> None:
    tasks = queue([[0.0, 0.0]], [0.0], [2.0, 2.0])
    assert collectives(tasks, simulate(tasks, FREE, slots=2)) == [(0.0, 4.0), (0.0, 4.0)]


def test_the_latency_of_a_collective_passes_while_the_one_before_is_sent() -> None:
    # Both are ready at 1. Each alone takes 2 s, of which the link works 1.5 s: 1 + 0.5 + 2 · 1.5.
    tasks = queue([[1.0, 1.0]], [1.0], [2.0, 2.0], [0.5, 0.5])
    assert collectives(tasks, simulate(tasks, FREE)) == [(1.0, 3.0), (2.5, 4.5)]


def test_overlapped_compute_and_collective_slow_each_other() -> None:
    # e = 0.5, s = 2: from 1 on the collective runs at half speed, compute at 1 − 0.5/2 = 3/4;
    # the collective's 1 s takes 2 s, in which compute does 1.5 of its 3 s; 1.5 s remain.
    tasks = queue([[1.0]], [4.0], [1.0])
    played = simulate(tasks, Overlap(0.5, 2.0))
    assert collectives(tasks, played) == [(1.0, 3.0)]
    assert played.step_s == pytest.approx(4.5)  # compute alone + exposed ratio × collective


def test_a_collective_waits_for_the_slowest_class_of_ranks() -> None:
    tasks = queue([[1.0], [2.5]], [1.0, 2.5], [1.0])
    played = simulate(tasks, FREE)
    assert collectives(tasks, played) == [(2.5, 3.5)]
    assert played.end_s[0].tolist() == [1.0, 2.5]


def test_compute_that_waits_for_a_collective_stands_still() -> None:
    # 1 s of compute, 2 s of a collective, 3 s of compute after it: the work of 1 s stands twice.
    tasks = TaskList()
    first = tasks.add(COMPUTE, 1.0)
    tasks.add(COMPUTE, 3.0, tasks.add(NETWORK, 2.0, first))
    played = simulate(tasks.tasks, FREE)
    done, time = played.tracks[0]
    assert played.step_s == 6.0
    assert [t for d, t in zip(done, time, strict=True) if d == 1.0] == [1.0, 3.0]


def test_tasks_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(RuntimeError, match="wait for each other"):
        simulate([Task(COMPUTE, 1.0, (1,)), Task(NETWORK, 1.0, (0,))], FREE)


@given(
    work=st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=8),
    cost=st.lists(st.floats(1e-4, 1.0), min_size=8, max_size=8),
    slots=st.integers(1, 3),
    exposed=st.floats(0.0, 3.0),
    slowdown=st.floats(1.0, 4.0),
)
def test_no_work_is_lost_or_done_twice(
    work: list[float], cost: list[float], slots: int, exposed: float, slowdown: float
) -> None:
    ready = np.cumsum(work).tolist()
    overlap, costs = Overlap.of(exposed, slowdown), cost[: len(work)]
    tasks = queue([ready], [ready[-1]], costs)
    played = simulate(tasks, overlap, slots=slots)
    assert played.step_s >= max(ready[-1], sum(costs)) * (1 - 1e-9)
    assert played.step_s <= (ready[-1] + sum(costs) * (1 + overlap.slowdown)) * (1 + 1e-9)
    starts = [start for start, _ in collectives(tasks, played)]
    assert starts == sorted(starts)


class Slack:
    """The lane's time that is left when each bucket is ready."""

    alike = None

    def __init__(self, slack_s: Sequence[float]) -> None:
        self._slack_s = slack_s

    def slack_s(self, rows: object) -> np.ndarray:
        return np.array(self._slack_s)


@given(
    work=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8),
    tail=st.floats(0.0, 1.0),
    cost=st.lists(st.floats(1e-6, 2.0), min_size=8, max_size=8),
    slots=st.integers(1, 3),
    exposed=st.floats(0.0, 3.0),
    slowdown=st.floats(1.0, 4.0),
    others=st.lists(st.floats(0.3, 2.0), max_size=3),
    latency_s=st.floats(0.0, 0.5),
)
def test_the_closed_form_equals_the_event_simulation(
    work: list[float],
    tail: float,
    cost: list[float],
    slots: int,
    exposed: float,
    slowdown: float,
    others: list[float],
    latency_s: float,
) -> None:
    overlap = Overlap.of(exposed, slowdown)
    # Where compute stands still beside collectives, a latency that ends with it may end before or
    # after: the step jumps there.
    assume(overlap.drain > 0 or latency_s == 0)
    ready, costs = np.cumsum(work), np.array(cost[: len(work)])
    speeds = [1.0, *others]
    # A second a byte; the latency of a collective is never more than half of it.
    waits = np.minimum(latency_s, costs / 2)
    tasks = queue(
        [(ready * speed).tolist() for speed in speeds],
        [float(ready[-1] + tail) * speed for speed in speeds],
        costs.tolist(),
        waits.tolist(),
    )
    played = simulate(tasks, overlap, slots=slots)
    lane_s = float(ready[-1] + tail) * max(speeds)
    corrections = Corrections(
        np.zeros(1), np.zeros(1), lines=(Line(0.0, 1.0),), latency_s=latency_s
    )
    model = CollectiveModel((Line(0.0, 1.0),), 0, 1.0, False)
    slack = Slack((lane_s - ready * max(speeds)).tolist())
    exposed_s, _ = BucketQueue((corrections,), costs).exposed_s(slack, model, 1.0, overlap)
    assert lane_s + exposed_s == pytest.approx(played.step_s, rel=1e-9)


GRAPH = perceptron([32, 64, 32], batch=4)
OPS = 2 * (2 + 5)  # two layers: two ops forward, five backward each


def answer(allocation: str, **options: int) -> Estimate:
    return est.estimate(GRAPH, allocation, profile=Machine().profile(), **options)


def test_a_span_looked_up_equals_the_one_met_on_the_way() -> None:
    spans = answer("1x2:m").timeline.spans
    listed = list(spans)
    assert len(spans) == len(listed) == OPS + 1 + 3  # one bucket; wait, copy back, update
    assert spans[3] == listed[3]
    assert spans[-1] == listed[-1]
    assert list(spans[2:5]) == listed[2:5]
    assert (listed[0].name, listed[0].phase) == ("aten.mm.default", "forward")
    assert (listed[-1].name, listed[-1].phase) == ("update", "update")


def test_every_micro_batch_runs_the_ops_one_after_the_other() -> None:
    spans = [span for span in answer("1x1:m", accumulation_steps=3).timeline.spans if span.phase]
    ops = [span for span in spans if span.phase != "update"]
    assert [span.name for span in ops] == [op.call.target for op in GRAPH.ops] * 3
    assert all(a.end_s <= b.start_s + 1e-12 for a, b in pairwise(ops))


def test_ranks_under_unlike_load_have_tracks_of_their_own() -> None:
    # Four ranks on a node and one alone: the first of either stands for its equals.
    timeline = answer("1x4:m+2x1:m").timeline
    assert timeline.ranks_like == (0, 0, 0, 0, 4, 4)
    by_rank = {rank: [s for s in timeline.spans if s.rank == rank] for rank in (0, 4)}
    assert len(by_rank[0]) == len(by_rank[4])
    assert {span.rank for span in timeline.spans} == {0, 4}
    ends = {rank: max(map(end_s, spans)) for rank, spans in by_rank.items()}
    assert ends[0] == ends[4] == timeline.step_time_s


def end_s(span: Span) -> float:
    return span.end_s


seconds = st.one_of(st.just(0.0), st.floats(1e-3, 1.0))
overlaps = st.builds(Overlap.of, st.floats(0.0, 2.0), st.floats(1.0, 3.0))


@st.composite
def task_lists(draw: st.DrawFn, kinds: int = 1, rows: int = 0) -> list[Task]:
    """Tasks on three lanes that wait for any that come before them."""
    shape = (kinds,) if kinds > 1 else ()
    tasks: list[Task] = []
    for number in range(draw(st.integers(1, 12))):
        lane = draw(st.sampled_from([COMPUTE, COMPUTE, NETWORK, REPLICATES]))
        own = shape if lane == COMPUTE else ()
        size = (*own, rows) if rows else own
        if rows and lane == COMPUTE and not own:
            size = (1, rows)
        count = int(np.prod(size)) if size else 1
        cost = np.array(draw(st.lists(seconds, min_size=count, max_size=count))).reshape(size)
        after = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        tasks.append(Task(lane, cost if size else float(cost), tuple(sorted(after))))
    return tasks


def test_a_pair_that_slow_each_other_by_hand() -> None:
    # e = 1/2, s = 2: compute at 3/4 of its rate, the collective at half. Compute of 3 s ends at 4,
    # the collective of 4 s has 2 s left then.
    tasks = TaskList()
    tasks.add(COMPUTE, 3.0)
    tasks.add(NETWORK, 4.0)
    assert play(tasks.tasks, Overlap(0.5, 2.0)) == pytest.approx(6.0)


def test_a_collective_waits_for_the_last_class_and_frees_each() -> None:
    # Classes come at 1 and 2, the collective takes 1, then they compute 5 and 1.
    tasks = TaskList()
    come = tasks.add(COMPUTE, np.array([1.0, 2.0]))
    tasks.add(COMPUTE, np.array([5.0, 1.0]), tasks.add(NETWORK, 1.0, come))
    assert play(tasks.tasks, NO_OVERLAP) == 8.0


@settings(max_examples=examples(200), deadline=None)
@given(st.one_of(task_lists(), task_lists(kinds=3)), st.one_of(st.just(NO_OVERLAP), overlaps))
def test_the_evaluator_equals_the_event_simulation(tasks: list[Task], overlap: Overlap) -> None:
    # Compute that cannot advance beside collectives would never end beside one that never does.
    expected = simulate(tasks, overlap).step_s
    assert play(tasks, overlap) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.one_of(task_lists(rows=3), task_lists(kinds=2, rows=3)),
    st.lists(st.one_of(st.just(NO_OVERLAP), overlaps), min_size=3, max_size=3),
)
def test_every_row_is_played_as_it_would_be_alone(tasks: list[Task], each: list[Overlap]) -> None:
    columns = Overlap(*(np.array(column) for column in zip(*each, strict=True)))
    found = np.broadcast_to(play(tasks, columns), 3)
    for row, overlap in enumerate(each):
        alone = [task._replace(cost_s=np.asarray(task.cost_s)[..., row]) for task in tasks]
        assert found[row] == pytest.approx(simulate(alone, overlap).step_s, rel=1e-9, abs=1e-12)
