"""Say what a step is made of, pieces of work on lanes; play it; hold what ran where and when.

Work on the lane `COMPUTE` is done by every class of ranks for itself; every other lane is a
communicator, whose collectives begin when all ranks have come to them. A lane takes its tasks in
order; a communicator sends up to `slots` collectives at a time, which share its rate, and a
collective's latency passes before it is sent, beside the one before, at no cost to either.
While any collective is sent and any rank computes, each slows the other as `Overlap` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args, overload

import numpy as np

from estimator.elementwise import Array, Indices, maximum
from estimator.timeline.collectives.overlap import Overlap

Lane = Literal["host", "compute", "network", "h2d", "d2h"]
LANES: tuple[Lane, ...] = get_args(Lane)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One thing on one lane of one rank, seconds from the start of the step."""

    name: str
    rank: int
    lane: Lane
    start_s: float
    duration_s: float
    module: str = ""
    phase: str = ""

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


class Label(NamedTuple):
    """What a span shows beside its place and time."""

    name: str
    module: str = ""
    phase: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpanColumns(Sequence[Span]):
    """Many spans as columns; a `Span` is made of one when it is looked at.

    `label` holds indices into `labels`, `lane` indices into `LANES`.
    """

    labels: Sequence[Label]
    label: Indices
    rank: Indices
    lane: Indices
    start_s: Array
    duration_s: Array

    def __len__(self) -> int:
        return len(self.label)

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> SpanColumns: ...
    def __getitem__(self, index: int | slice) -> Span | SpanColumns:
        if isinstance(index, int):
            return next(iter(self[range(len(self))[index] :][:1]))
        return SpanColumns(
            labels=self.labels,
            label=self.label[index],
            rank=self.rank[index],
            lane=self.lane[index],
            start_s=self.start_s[index],
            duration_s=self.duration_s[index],
        )

    def __iter__(self) -> Iterator[Span]:
        columns = (self.label, self.rank, self.lane, self.start_s, self.duration_s)
        for label, rank, lane, start_s, duration_s in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            name, module, phase = self.labels[label]
            yield Span(
                name=name,
                rank=rank,
                lane=LANES[lane],
                start_s=start_s,
                duration_s=duration_s,
                module=module,
                phase=phase,
            )


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of one step of every rank; a rank of a class shares the spans of its class."""

    step_time_s: float
    spans: Sequence[Span]
    ranks_like: tuple[int, ...]
    """For each rank, the rank whose spans are listed for it (itself, or its equal twin)."""


def flat_tracks(spans: Iterable[Span]) -> list[list[Span]]:
    """Spread spans over as few tracks as keep those of one track apart, to the nanosecond."""
    tracks: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        for track in tracks:
            if whole_ns(track[-1].end_s) <= whole_ns(span.start_s):
                track.append(span)
                break
        else:
            tracks.append([span])
    return tracks


def whole_ns(seconds: float) -> int:
    """Nanoseconds, as viewers keep them; rounding both ends of a span keeps neighbours apart."""
    return round(seconds * 1e9)


NO_LABEL = Label("")
COMPUTE = "compute"
# Lanes of communicators: the data-parallel group, or FSDP's two.
NETWORK = "network"
REPLICATES = "network between replicates"


class Task(NamedTuple):
    """One piece of work; it starts once its lane is free and every task of `after` has ended.

    `cost_s` is what it takes alone: of a collective a number, or a row for each of many steps; of
    compute that as well, with one more axis in front where there are several kinds of ranks.
    Of a collective, `latency_s` of that pass without work for the link, in the time of compute.
    """

    lane: str
    cost_s: Any
    after: tuple[int, ...] = ()
    latency_s: Any = 0.0
    label: Label = NO_LABEL


class TaskList:
    """Tasks in an order in which every one comes after all that it waits for."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def add(
        self,
        lane: str,
        cost_s: Any,
        *after: int | None,
        latency_s: Any = 0.0,
        label: Label = NO_LABEL,
    ) -> int:
        """Add a task and return its number; None among `after` stands for no task."""
        waits = tuple(task for task in after if task is not None)
        self.tasks.append(Task(lane, cost_s, waits, latency_s, label))
        return len(self.tasks) - 1


def kinds_of(tasks: Sequence[Task]) -> int:
    """How many kinds of ranks compute in tasks of one step."""
    return max((np.size(task.cost_s) for task in tasks if task.lane == COMPUTE), default=1)


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
        rows += [np.shape(lane) for lane in overlap]
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
    places: list[int] = []
    lengths: dict[str, int] = {}
    for task in tasks:
        places.append(lengths.get(task.lane, 0))
        lengths[task.lane] = places[-1] + 1
    return places, max(lengths.values(), default=0)
