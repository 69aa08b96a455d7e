"""Play tasks on lanes: when each one ends, for one step or for a row of each of many.

Without contention a task ends at max(what it waits for, its lane is free) + its cost. Where compute
and collectives slow each other, all lanes advance together from one end to the next, at the rates
of the overlap model. A queue of collectives for which no compute waits is given in closed form by
`bucket_queue`. Source of the model: `tasks` and `Overlap`; `simulation` plays the same by events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estimator.elementwise import maximum
from estimator.timeline.overlaps import Overlap
from estimator.timeline.tasks import COMPUTE, Task

Array = NDArray[np.float64]

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
    """Where every lane of every row stands: its task, and what is left of it.

    Lanes are rows of the arrays (lanes, rows): first compute of each class of ranks, then the
    communicators. `_ended` has a row for each (task, class), and one more that has always ended.
    """

    def __init__(self, tasks: Sequence[Task], overlap: Overlap) -> None:
        computing = np.broadcast_arrays(*(t.cost_s for t in tasks if t.lane == COMPUTE), 0.0)
        shape = computing[0].shape
        rows = [np.shape(task.cost_s)[-1:] for task in tasks if task.lane != COMPUTE]
        rows += [np.shape(each) for each in overlap]
        self.is_column = len(shape) == 2 or any(row not in ((), (1,)) for row in rows)
        count = max([int(np.prod(row)) for row in rows] + [shape[1] if len(shape) == 2 else 1])
        self._kinds = shape[0] if shape else 1
        names = list(dict.fromkeys(task.lane for task in tasks if task.lane != COMPUTE))
        self._lane_names = [COMPUTE] * self._kinds + names
        on = [[n for n, t in enumerate(tasks) if t.lane == lane] for lane in self._lane_names]
        most = max(map(len, on))
        # The task behind the last one of a lane is never ready.
        self._tasks = np.full((len(on), most + 1), len(tasks), dtype=np.intp)
        self._costs = np.zeros((len(on), most + 1, count))
        for lane, numbers in enumerate(on):
            self._tasks[lane, : len(numbers)] = numbers
            for place, number in enumerate(numbers):
                cost = np.asarray(tasks[number].cost_s)
                one = lane < self._kinds and cost.ndim and len(shape) > 0
                self._costs[lane, place] = cost[lane] if one else cost
        self._waits = self._dependencies(tasks)
        self._ended = np.zeros((len(tasks) + 1, self._kinds, count), dtype=np.bool_)
        self._ended[-1] = True
        self._place = np.zeros((len(on), count), dtype=np.intp)
        self._left = self._costs[:, 0].copy()
        self._lane = np.arange(len(on))[:, None]
        self._row = np.arange(count)[None]
        self.now: Array = np.zeros(count)
        self._compute_rate = np.broadcast_to(np.asarray(overlap.compute_rate, dtype=float), count)
        self._network_rate = 1.0 / np.broadcast_to(np.asarray(overlap.slowdown, dtype=float), count)

    def _dependencies(self, tasks: Sequence[Task]) -> NDArray[np.intp]:
        """The tasks that each one waits for, padded with the one that has always ended."""
        most = max((len(task.after) for task in tasks), default=0)
        waits = np.full((len(tasks) + 1, max(most, 1)), len(tasks), dtype=np.intp)
        for number, task in enumerate(tasks):
            waits[number, : len(task.after)] = task.after
        return waits

    def advance(self) -> bool:
        """Go on to the next end of each row; False once nothing is left to do."""
        kinds = self._kinds
        task = self._tasks[self._lane, self._place]
        unfinished = task < len(self._ended) - 1
        if not unfinished.any():
            return False
        active = unfinished & self._ready(task)
        computing, sending = active[:kinds].any(axis=0), active[kinds:].any(axis=0)
        both = computing & sending
        rate = np.ones(self._left.shape)
        rate[:kinds] = np.where(both, self._compute_rate, 1.0)
        rate[kinds:] = np.where(both, self._network_rate, 1.0)
        wait = np.where(self._left > 0, self._left / rate, 0.0)
        wait = np.where(active, wait, np.inf)
        step = wait.min(axis=0)
        step = np.where(np.isfinite(step), step, 0.0)
        self.now += step
        ends = active & (wait <= step * (1 + _SAME))
        self._left = np.where(active & ~ends, self._left - step * rate, self._left)
        self._finish(task, ends)
        return True

    def _ready(self, task: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Whether all that the task of each lane waits for has ended, for its class or for all."""
        waits = self._waits[task]
        kinds, lanes = self._kinds, len(self._lane_names)
        row = self._row[..., None]
        own = self._ended[waits[:kinds], np.arange(kinds)[:, None, None], row].all(axis=-1)
        if lanes == kinds:
            return np.asarray(own)
        whole: NDArray[np.bool_] = np.asarray(self._ended.all(axis=1))
        return np.concatenate([own, whole[waits[kinds:], row].all(axis=-1)])

    def _finish(self, task: NDArray[np.intp], ends: NDArray[np.bool_]) -> None:
        lane, row = np.nonzero(ends)
        ended = task[lane, row]
        # Lanes come in order: those of compute first.
        own = int(np.searchsorted(lane, self._kinds))
        self._ended[ended[:own], lane[:own], row[:own]] = True
        self._ended[ended[own:], :, row[own:]] = True
        place = self._place[lane, row] + 1
        self._place[lane, row] = place
        self._left[lane, row] = self._costs[lane, place, row]
