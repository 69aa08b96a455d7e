"""The evaluator of tasks: worked out by hand, equal to the simulation, and alike for many rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimator.timeline.collectives.overlap import NO_OVERLAP, Overlap
from estimator.timeline.simulator.simulation import simulate
from estimator.timeline.simulator.tasks import COMPUTE, NETWORK, REPLICATES, Task, TaskList, play
from tests.budgets import examples

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


def test_two_blocks_gathered_ahead_by_hand() -> None:
    # Gathers of 1 s and computes of 3 s: the second gather runs beside the first compute.
    tasks = TaskList()
    first = tasks.add(COMPUTE, 3.0, tasks.add(NETWORK, 1.0))
    second = tasks.add(COMPUTE, 3.0, tasks.add(NETWORK, 1.0))
    tasks.add(NETWORK, 2.0, second)
    assert first == 1
    assert play(tasks.tasks, NO_OVERLAP) == 1 + 3 + 3 + 2


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
