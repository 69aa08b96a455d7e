"""Play the passes of a pipeline, and advance micro-batches in the middle by their period.

Every task ends at the latest end that it waits for and its cost. The schedule repeats blocks of
tasks, one block for each micro-batch (or round of them). Once every task of a block ends later by
an amount of its own than in the block before, and has done so for as long as any task looks back,
the ends go on by these amounts until a wait that was not the latest becomes it: that many blocks
are added at once. The result is that of all tasks, but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from estimator.timeline.pipelines.steps import COSTS, StageCosts, cost_of, step_items
from estimator.workload.schedules import Schedule

# Amounts that differ by this share of the step so far are equal: what sums of floats are off by.
_SAME = 1e-12
# Blocks that must follow each other alike to be taken as repeated.
_FEWEST_BLOCKS = 3


class RunTask(NamedTuple):
    """The number of a task's cost, and how far back the ends that it waits for stand (negative).

    With one or two of these the first one stands for the others.
    """

    cost: int
    first: int
    second: int
    third: int


class Run(NamedTuple):
    """Tasks that are played so many times; `more` times more for each further block."""

    tasks: tuple[RunTask, ...]
    times: int
    more: int


class _Pattern(NamedTuple):
    """A step as runs of tasks, of `blocks` micro-batches or rounds.

    `last` is how far from the end each rank's last pass stands, `reach` how far back anything
    looks.
    """

    runs: tuple[Run, ...]
    last: tuple[int, ...]
    reach: int
    blocks: int


def last_ends_s(
    schedule: Schedule, ranks: int, micro_batches: int, stages: Sequence[StageCosts]
) -> list[float]:
    """When each rank ends its last pass; raises StrategyError as `pipeline_tasks` does."""
    schedule.check(ranks, micro_batches)
    return list(_last_ends_s(schedule, ranks, micro_batches, tuple(stages)))


@lru_cache(maxsize=4096)
def _last_ends_s(
    schedule: Schedule, ranks: int, micro_batches: int, stages: tuple[StageCosts, ...]
) -> tuple[float, ...]:
    # Strategies differ in what comes after the last pass: the passes themselves are played once.
    each = schedule.round_of(ranks, micro_batches)
    pattern = _pattern(schedule, ranks, each, micro_batches // each)
    seconds = [float(cost) for stage in stages for cost in stage.of()]
    ends = [0.0]
    added = micro_batches // each - pattern.blocks
    for run in pattern.runs:
        play_run(run, run.times + run.more * added, pattern.reach, seconds, ends)
    return tuple([ends[place] for place in pattern.last])


def play_run(run: Run, times: int, reach: int, seconds: Sequence[float], ends: list[float]) -> None:
    """Play a run so many times and add the ends."""
    length, alike = len(run.tasks), 0
    window = -(-reach // length) + 2
    growth: list[float] = []
    left = times
    while left:
        begin = len(ends)
        for cost, first, second, third in run.tasks:
            end, other = ends[first], ends[second]
            if other > end:
                end = other
            other = ends[third]
            if other > end:
                end = other
            ends.append(end + seconds[cost])
        left -= 1
        if times <= window or times - left < 2:
            continue
        before, now = ends[begin - length : begin], ends[begin:]
        grown = [b - a for a, b in zip(before, now, strict=True)]
        tolerance = _SAME * ends[-1]
        same = len(growth) == length and all(
            -tolerance <= b - a <= tolerance for a, b in zip(growth, grown, strict=True)
        )
        alike, growth = (alike + 1 if same else 0), grown
        if left and alike >= window:
            added = min(left, _blocks_ahead(run, seconds, ends, growth, tolerance))
            if added:
                _advance(ends, growth, added, reach)
                left -= added
                alike = 0


def _blocks_ahead(
    run: Run,
    seconds: Sequence[float],
    ends: Sequence[float],
    growth: Sequence[float],
    tolerance: float,
) -> int:
    """For how many blocks more every task waits for what it waits for now."""
    length = len(run.tasks)
    tasks = np.array(run.tasks)
    place = np.arange(length)[:, None]
    waited = place + tasks[:, 1:]
    known = np.array(ends[waited.min() - length :] if waited.min() < 0 else ends[-length:])
    own = np.array(growth)
    slack_s = (known[-length:] - np.array(seconds)[tasks[:, 0]])[:, None] - known[waited - length]
    nearing_s = own[waited % length] - own[:, None]
    if not ((slack_s <= tolerance) & (np.abs(nearing_s) <= tolerance)).any(axis=1).all():
        return 0
    nears = nearing_s > tolerance
    if not nears.any():
        return 1 << 62
    return max(int((slack_s[nears] / nearing_s[nears]).min()) - 1, 0)


def _advance(ends: list[float], growth: Sequence[float], blocks: int, reach: int) -> None:
    """Let the last ends be those of so many blocks later."""
    length = len(growth)
    count = min(-(-reach // length) * length, len(ends) - 1)
    for back in range(1, count + 1):
        ends[-back] += blocks * growth[-((back - 1) % length) - 1]


@lru_cache(maxsize=512)
def _pattern(schedule: Schedule, ranks: int, each: int, blocks: int) -> _Pattern:
    """The pattern of a step; that of many micro-batches is found from fewer."""
    few = 4 * schedule.virtual * ranks // each + 6
    if blocks > few:
        found = _repeating(schedule, ranks, each, few)
        if found is not None:
            return found
    return _runs_of(schedule, ranks, each, blocks)


@lru_cache(maxsize=128)
def _repeating(schedule: Schedule, ranks: int, each: int, blocks: int) -> _Pattern | None:
    """The pattern of so many blocks and more; None where one more changes what does not repeat."""
    one, more = (_runs_of(schedule, ranks, each, count) for count in (blocks, blocks + 1))
    alike = [run.tasks for run in one.runs] == [run.tasks for run in more.runs]
    if not alike or one[1:3] != more[1:3]:
        return None
    runs = [
        run._replace(more=longer.times - run.times)
        for run, longer in zip(one.runs, more.runs, strict=True)
    ]
    return one._replace(runs=tuple(runs))


def _runs_of(schedule: Schedule, ranks: int, each: int, blocks: int) -> _Pattern:
    """All tasks of a step, as runs of those that repeat and of those that do not."""
    tasks, micro_batches, last = _tasks(schedule, ranks, each * blocks)
    place = {
        (task.cost, number): at
        for at, (task, number) in enumerate(zip(tasks, micro_batches, strict=True))
    }
    runs: list[Run] = []
    # Up to where tasks repeat, by how far apart: found once for all that begin on the way.
    known: dict[int, int] = {}
    begin = at = 0
    while at < len(tasks):
        length = place.get((tasks[at].cost, micro_batches[at] + each), at) - at
        end = max(at, known.get(length, 0))
        while (
            0 < length < len(tasks) - end
            and tasks[end] == tasks[end + length]
            and micro_batches[end] + each == micro_batches[end + length]
        ):
            end += 1
        known[length] = end
        times = (end - at) // length + 1 if length > 0 else 1
        if times < _FEWEST_BLOCKS:
            at += 1
            continue
        if begin < at:
            runs.append(Run(tuple(tasks[begin:at]), 1, 0))
        runs.append(Run(tuple(tasks[at : at + length]), times, 0))
        begin = at = at + times * length
    if begin < len(tasks):
        runs.append(Run(tuple(tasks[begin:]), 1, 0))
    reach = -min([*last, *(back for task in tasks for back in task[1:])])
    return _Pattern(tuple(runs), last, reach, blocks)


def _tasks(
    schedule: Schedule, ranks: int, micro_batches: int
) -> tuple[list[RunTask], list[int], tuple[int, ...]]:
    """(tasks, the micro-batch of each, how far from the end each rank's last pass stands)."""
    tasks: list[RunTask] = []
    numbers: list[int] = []
    free: dict[tuple[int, int | None], int] = {}
    last = [0] * ranks
    for at, item in enumerate(step_items(schedule, ranks, micro_batches)):
        action, rank, to_rank, after = item
        if to_rank is None:
            last[rank] = at
        lane = rank, to_rank
        waits = {*after, *([free[lane]] if lane in free else [])} or {-1}
        free[lane] = at
        backs = sorted(wait - at for wait in waits)
        cost = action.stage * len(COSTS) + cost_of(schedule, item)
        tasks.append(RunTask(cost, *(backs * 3)[:3]))
        numbers.append(action.micro_batch)
    return tasks, numbers, tuple(at - len(tasks) for at in last)
