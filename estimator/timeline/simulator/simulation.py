"""Simulate the tasks of one step by events: what ran when, on every lane.

It plays the model that `tasks` states and shares no code with `tasks.play` and `rules.BucketQueue`,
which it must equal. Compute and collectives are fluids that slow each other down while both flow.
With e the exposed ratio and s the slowdown of `Overlap`, a collective beside compute advances at
1/s of its own rate and compute at 1 − e/s of its own; the collectives in flight on a communicator
share its rate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from estimator.elementwise import Array
from estimator.timeline.collectives.overlap import Overlap
from estimator.timeline.simulator.tasks import COMPUTE, Task, kinds_of

# What is left of a task, as a share of it, when it counts as done.
_NOTHING = 1e-15


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A simulated step. `start_s` and `end_s` have a row for each task and a column a class.

    `tracks[c]` are the points (work done by class c, time) between which its compute advances
    evenly: where the class waits, one amount of work stands at two times.
    """

    start_s: Array
    end_s: Array
    tracks: tuple[tuple[Array, Array], ...]
    step_s: float


def simulate(tasks: Sequence[Task], overlap: Overlap, *, slots: int = 1) -> SimulatedStep:
    """Run all lanes to the end; raises RuntimeError for tasks that wait for each other."""
    state = _State(tasks, overlap, slots)
    while state.unfinished:
        state.begin_what_can()
        state.advance()
    return state.played()


class _Work:
    """A task on one lane: what is left of its latency and of itself."""

    __slots__ = ("alone_s", "latency_s", "left_s", "number")

    def __init__(self, number: int, alone_s: float, latency_s: float) -> None:
        self.number, self.latency_s = number, latency_s
        self.alone_s = self.left_s = alone_s - latency_s


class _State:
    """Where everything is at one moment of the simulation."""

    def __init__(self, tasks: Sequence[Task], overlap: Overlap, slots: int) -> None:
        self.tasks, self.slots = tasks, slots
        self.slowdown = float(overlap.slowdown)
        self.beside_rate = max(1.0 - float(overlap.exposed_ratio) / self.slowdown, 0.0)
        self.now = 0.0
        kinds = kinds_of(tasks)
        self.start = np.full((len(tasks), kinds), np.nan)
        self.end = np.full((len(tasks), kinds), np.nan)
        self.unfinished = 0
        self.computing: list[deque[_Work]] = [deque() for _ in range(kinds)]
        self.sending: dict[str, deque[_Work]] = {}
        for number, task in enumerate(tasks):
            if task.lane == COMPUTE:
                costs = np.broadcast_to(task.cost_s, kinds).tolist()
                for lane, alone_s in zip(self.computing, costs, strict=True):
                    lane.append(_Work(number, alone_s, 0.0))
            else:
                work = _Work(number, float(task.cost_s), float(task.latency_s))
                self.sending.setdefault(task.lane, deque()).append(work)
            self.unfinished += kinds if task.lane == COMPUTE else 1
        self.done = [0.0] * kinds
        self.tracks: list[list[tuple[float, float]]] = [[(0.0, 0.0)] for _ in range(kinds)]

    def has_come(self, work: _Work, rank: int | None) -> bool:
        """Whether all that a task waits for has ended: for one class of ranks, or for all."""
        for number in self.tasks[work.number].after:
            ends = self.end[number]
            if np.isnan(ends if rank is None else ends[rank]).any():
                return False
        return True

    def begin_what_can(self) -> None:
        """Mark what runs from now on; collectives begin in order, as far as there are slots."""
        self.active: list[tuple[int, _Work]] = []
        self.in_flight: dict[str, list[_Work]] = {}
        self.waking: list[_Work] = []
        for rank, lane in enumerate(self.computing):
            if lane and self.has_come(lane[0], rank):
                self.active.append((rank, lane[0]))
        for name, queue in self.sending.items():
            in_turn = True
            for place, work in enumerate(queue):
                if not self.has_come(work, None):
                    break
                in_turn = in_turn and work.latency_s <= 0.0 and place < self.slots
                if in_turn:
                    self.in_flight.setdefault(name, []).append(work)
                elif work.latency_s > 0.0:
                    self.waking.append(work)
        for rank, work in self.active:
            self._mark(work, rank)
        for works in self.in_flight.values():
            for work in works:
                self._mark(work, None)

    def _mark(self, work: _Work, rank: int | None) -> None:
        columns = slice(None) if rank is None else slice(rank, rank + 1)
        if np.isnan(self.start[work.number, columns]).any():
            latency_s = float(self.tasks[work.number].latency_s) if rank is None else 0.0
            self.start[work.number, columns] = self.now - latency_s
            if rank is not None:
                self.tracks[rank].append((self.done[rank], self.now))

    def advance(self) -> None:
        """Go on to the next end."""
        both = bool(self.active) and bool(self.in_flight)
        clock_rate = self.beside_rate if both else 1.0
        link_rate = 1.0 / self.slowdown if both else 1.0
        moving = [(work, clock_rate) for _, work in self.active]
        moving += [
            (work, link_rate / len(works)) for works in self.in_flight.values() for work in works
        ]
        waits = [_wait_s(work.left_s, work.alone_s, rate) for work, rate in moving]
        waits += [_wait_s(work.latency_s, work.latency_s, clock_rate) for work in self.waking]
        if not waits or min(waits) == np.inf:
            raise RuntimeError("tasks wait for each other; a task may name only earlier ones")
        step = min(waits)
        self.now += step
        for work in self.waking:
            left = work.latency_s - step * clock_rate
            work.latency_s = left if left > _NOTHING * self.now else 0.0
        for rank, work in self.active:
            self._work_on(work, step * clock_rate, rank)
        for name, works in self.in_flight.items():
            for work in works:
                work.left_s -= step * link_rate / len(works)
                if work.left_s <= _NOTHING * work.alone_s:
                    self.end[work.number] = self.now
                    self.sending[name].remove(work)
                    self.unfinished -= 1

    def _work_on(self, work: _Work, amount: float, rank: int) -> None:
        ended = work.left_s - amount <= _NOTHING * work.alone_s
        self.done[rank] += work.left_s if ended else amount
        work.left_s -= amount
        self.tracks[rank].append((self.done[rank], self.now))
        if ended:
            self.end[work.number, rank] = self.now
            self.computing[rank].popleft()
            self.unfinished -= 1

    def played(self) -> SimulatedStep:
        return SimulatedStep(
            start_s=self.start,
            end_s=self.end,
            tracks=tuple(
                (np.array([done for done, _ in track]), np.array([at for _, at in track]))
                for track in self.tracks
            ),
            step_s=self.now,
        )


def _wait_s(left_s: float, alone_s: float, rate: float) -> float:
    if left_s <= _NOTHING * alone_s:
        return 0.0
    return left_s / rate if rate > 0 else np.inf
