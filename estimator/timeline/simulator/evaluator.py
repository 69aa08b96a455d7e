"""Play tasks on lanes: when each one ends, for one step or for a row of each of many.

Without contention a task ends at max(what it waits for, its lane is free) + its cost. Where compute
and collectives slow each other, all lanes advance together from one end to the next, at the rates
of the overlap model. A queue of collectives for which no compute waits is given in closed form by
`rules.BucketQueue`. Source of the model: `tasks` and `Overlap`; `simulation` plays the same by
events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from estimator.elementwise import Array, maximum
from estimator.timeline.collectives.overlap import Overlap
from estimator.timeline.simulator.tasks import COMPUTE, Task

# Two ends this close, as a share of the time left to them, are one.
_SAME = 1e-12


def play(tasks: Sequence[Task], overlap: Overlap) -> Any:
    """When the last task has ended, in seconds: a number, or a row for each step.

    Communicators send one collective at a time, as NCCL does, and have no latency beside.
    """
    if overlap.is_free:
        return _recurrence(tasks)
    return _beside_each_other(tasks, overlap)


def _recurrence(tasks: Sequence[Task]) -> Any:
    """The last end: end = max(after, lane free) + cost."""
    ends: list[Any] = []
    free: dict[str, Any] = {}
    for lane, cost_s, after, _, _ in tasks:
        start = free.get(lane, 0.0)
        for number in after:
            end = ends[number]
            # A collective begins when the last class of ranks has come to it.
            if lane != COMPUTE and tasks[number].lane == COMPUTE:
                end = _last(end)
            start = maximum(start, end)
        free[lane] = start + cost_s
        ends.append(free[lane])
    last: Any = 0.0
    for lane, end in free.items():
        last = maximum(last, _last(end) if lane == COMPUTE else end)
    return last


def _last(ends: Any) -> Any:
    """The latest of the kinds of ranks."""
    return ends.max(axis=0) if isinstance(ends, np.ndarray) and ends.ndim else ends


def _beside_each_other(tasks: Sequence[Task], overlap: Overlap) -> Any:
    """All lanes of all rows advance from one end to the next."""
    state = _Lanes(tasks, overlap)
    with np.errstate(divide="ignore", invalid="ignore"):
        while state.advance():
            pass
    return state.now if state.is_column else float(state.now[0])


class _Lanes:
    """Where the lanes of every row stand: how many tasks have ended, what is left of the next.

    Lanes are rows of the arrays (lanes, rows): first compute of each class of ranks, then the
    communicators. Each plays its tasks in order, so that how many have ended says which.
    """

    def __init__(self, tasks: Sequence[Task], overlap: Overlap) -> None:
        computing = np.broadcast_arrays(*(t.cost_s for t in tasks if t.lane == COMPUTE), 0.0)
        shape = computing[0].shape
        rows = [np.shape(task.cost_s)[-1:] for task in tasks if task.lane != COMPUTE]
        rows += [np.shape(each) for each in overlap]
        self.is_column = len(shape) == 2 or any(row not in ((), (1,)) for row in rows)
        count = max([int(np.prod(row)) for row in rows] + [shape[1] if len(shape) == 2 else 1])
        self._kinds = kinds = shape[0] if shape else 1
        names = dict.fromkeys(task.lane for task in tasks if task.lane != COMPUTE)
        lanes = {COMPUTE: slice(kinds)}
        lanes |= {name: slice(kinds + n, kinds + n + 1) for n, name in enumerate(names)}
        places, length = _places(tasks)
        # Behind the last task of a lane is one that waits for more than there are.
        self._costs = np.zeros((kinds + len(names), length + 1, count))
        self._waits = np.full((kinds + len(names), length + 1, kinds + len(names)), length + 1)
        for task, place in zip(tasks, places, strict=True):
            lane, cost = lanes[task.lane], np.asarray(task.cost_s)
            computes = task.lane == COMPUTE
            self._costs[lane, place] = cost[:, None] if computes and cost.ndim == 1 else cost
            self._waits[lane, place] = 0
            for number in task.after:
                # Compute waits for that of its own class alone: its lane's order sees to it.
                if not (computes and tasks[number].lane == COMPUTE):
                    waits = self._waits[lane, place, lanes[tasks[number].lane]]
                    np.maximum(waits, places[number] + 1, out=waits)
        self._left = self._costs[:, 0].copy()
        self._ended = np.zeros(self._left.shape, dtype=np.intp)
        self._lane = np.arange(len(self._costs))[:, None]
        self._row = np.arange(count)[None]
        self.now: Array = np.zeros(count)
        self._both_rate = np.empty(self._left.shape)
        self._both_rate[:kinds] = overlap.compute_rate
        self._both_rate[kinds:] = 1.0 / np.asarray(overlap.slowdown, dtype=float)

    def advance(self) -> bool:
        """Go on to the next end of each row; False once nothing is left to do."""
        waits = self._waits[self._lane, self._ended]
        active = np.asarray((waits <= self._ended.T).all(axis=-1))
        if not active.any():
            return False
        both = active[: self._kinds].any(axis=0) & active[self._kinds :].any(axis=0)
        rate = np.where(both, self._both_rate, 1.0)
        wait = np.where(self._left > 0, self._left / rate, 0.0)
        wait = np.where(active, wait, np.inf)
        step = wait.min(axis=0)
        step = np.where(np.isfinite(step), step, 0.0)
        self.now += step
        ends = wait <= step * (1 + _SAME)
        self._ended += ends
        cost = self._costs[self._lane, self._ended, self._row]
        self._left = np.where(ends, cost, self._left - step * rate * active)
        return True


def _places(tasks: Sequence[Task]) -> tuple[list[int], int]:
    """Each task's place on its lane, and how many the longest lane has."""
    found: list[int] = []
    lengths: dict[str, int] = {}
    for task in tasks:
        found.append(lengths.get(task.lane, 0))
        lengths[task.lane] = found[-1] + 1
    return found, max(lengths.values(), default=0)
