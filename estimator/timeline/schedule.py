"""Simulate one data-parallel step: compute on each class of ranks, all-reduces beside it.

Compute and collectives are fluids that slow each other down while both flow. With e the exposed
ratio and s the collective's slowdown ratio of `OverlapCost`, a collective beside compute advances
at 1/s of its own rate and compute at 1 − e/s of its own; the collectives in flight share the rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeLane:
    """When one class of ranks has its buckets and its end if no collective disturbs it.

    `ready_s` is per bucket: the lane time at which the bucket can be reduced.
    """

    ready_s: Array
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """How compute and collectives slow each other (see the module's docstring)."""

    exposed_ratio: float = 0.0
    collective_slowdown_ratio: float = 1.0

    @property
    def compute_rate(self) -> float:
        return max(1.0 - self.exposed_ratio / self.slowdown, 0.0)

    @property
    def slowdown(self) -> float:
        return max(self.collective_slowdown_ratio, self.exposed_ratio, 1.0)


NO_OVERLAP = Overlap()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The simulated interval from the first op to the last all-reduce.

    `wall_at[c]` maps lane time of class c to wall time as (lane times, wall times) to interpolate;
    `collectives` are (start, end) per bucket.
    """

    wall_at: tuple[tuple[Array, Array], ...]
    collectives: tuple[tuple[float, float], ...]
    compute_end_s: tuple[float, ...]
    end_s: float


def simulate(
    lanes: Sequence[ComputeLane],
    collective_s: Sequence[float],
    *,
    latency_s: Sequence[float] | None = None,
    slots: int,
    overlap: Overlap,
) -> Flow:
    """Run the classes of ranks and their shared queue of collectives to the end.

    Collective k takes `collective_s[k]` alone, the first `latency_s[k]` of it beside the one before
    at no cost to either. It is sent once every class has reached its `ready_s[k]` and that latency
    has passed, its predecessors are being sent and one of `slots` is free.
    """
    latencies = latency_s or [0.0] * len(collective_s)
    state = _State(lanes, collective_s, latencies, slots, overlap)
    while not state.finished:
        state.start_ready()
        state.advance()
    return state.flow()


class _State:
    """Where every lane and collective is at one moment of the simulation.

    All lanes begin together and are slowed alike, so that one clock tells the lane time of all; it
    goes on at the speed of the wall when the last lane has ended.
    """

    def __init__(
        self,
        lanes: Sequence[ComputeLane],
        collective_s: Sequence[float],
        latency_s: Sequence[float],
        slots: int,
        overlap: Overlap,
    ) -> None:
        self.lanes = lanes
        self.slots = slots
        self.overlap = overlap
        self.now = self.clock = 0.0
        self.latency_s = latency_s
        self.left = [
            float(alone_s - before_s)
            for alone_s, before_s in zip(collective_s, latency_s, strict=True)
        ]
        self.sendable = [
            float(max(lane.ready_s[k] for lane in lanes) + before_s)
            for k, before_s in enumerate(latency_s)
        ]
        self.started = 0
        self.active: list[int] = []
        self.begin = [0.0] * len(self.left)
        self.done = [0.0] * len(self.left)
        self.compute_end = [0.0 if lane.total_s <= 0 else -1.0 for lane in lanes]
        self.track: list[list[tuple[float, float]]] = [[(0.0, 0.0)] for _ in lanes]

    @property
    def computing(self) -> list[int]:
        return [c for c, end in enumerate(self.compute_end) if end < 0]

    @property
    def finished(self) -> bool:
        return self.started == len(self.left) and not self.active and not self.computing

    def start_ready(self) -> None:
        while self.started < len(self.left) and len(self.active) < self.slots:
            k = self.started
            if self.clock < self.sendable[k]:
                return
            self.begin[k] = self.now - self.latency_s[k]
            self.active.append(k)
            self.started += 1

    def advance(self) -> None:
        computing = self.computing
        beside = bool(computing) and bool(self.active)
        network_rate = 1.0 / max(len(self.active), 1)
        clock_rate = 1.0
        if beside:
            network_rate /= self.overlap.slowdown
            clock_rate = self.overlap.compute_rate
        waits = [self.left[k] / network_rate for k in self.active]
        stops = [self.lanes[c].total_s for c in computing]
        if self.started < len(self.left) and self.sendable[self.started] > self.clock:
            stops.append(self.sendable[self.started])
        if clock_rate > 0 and stops:
            waits.append((min(stops) - self.clock) / clock_rate)
        step = max(min(waits), 0.0)
        self.now += step
        self._move(computing, stops, step * clock_rate)
        for k in list(self.active):
            self.left[k] -= step * network_rate
            if self.left[k] <= 1e-15:
                self.done[k] = self.now
                self.active.remove(k)

    def _move(self, computing: Sequence[int], stops: Sequence[float], amount: float) -> None:
        stop, moved = min(stops, default=np.inf), self.clock + amount
        self.clock = stop if moved >= stop - 1e-15 * max(stop, 1.0) else moved
        for c in computing:
            self.track[c].append((self.clock, self.now))
            if self.clock >= self.lanes[c].total_s:
                self.compute_end[c] = self.now

    def flow(self) -> Flow:
        walls = tuple(
            (np.array([p for p, _ in track]), np.array([w for _, w in track]))
            for track in self.track
        )
        return Flow(
            wall_at=walls,
            collectives=tuple(zip(self.begin, self.done, strict=True)),
            compute_end_s=tuple(self.compute_end),
            end_s=self.now,
        )
