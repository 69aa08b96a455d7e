"""The fluid simulation of compute and all-reduces, by hand-worked cases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.timeline.fastpath import exposed_s
from estimator.timeline.lanes import two_lanes
from estimator.timeline.schedule import ComputeLane, Overlap, simulate


def _lane(*ready_s: float, total_s: float) -> ComputeLane:
    return ComputeLane(ready_s=np.array(ready_s), total_s=total_s)


def test_perfect_overlap_exposes_only_what_comes_after_the_last_op() -> None:
    flow = simulate([_lane(1.0, 3.0, total_s=3.0)], [1.0, 0.5], slots=1, overlap=Overlap())
    assert flow.collectives == ((1.0, 2.0), (3.0, 3.5))
    assert flow.end_s == 3.5


def test_a_single_slot_makes_collectives_wait_for_each_other() -> None:
    flow = simulate([_lane(1.0, 1.0, total_s=2.0)], [2.0, 2.0], slots=1, overlap=Overlap())
    assert flow.collectives == ((1.0, 3.0), (3.0, 5.0))


def test_two_slots_share_the_rate_and_end_together() -> None:
    flow = simulate([_lane(0.0, 0.0, total_s=0.0)], [2.0, 2.0], slots=2, overlap=Overlap())
    assert flow.collectives == ((0.0, 4.0), (0.0, 4.0))


def test_the_latency_of_a_collective_passes_while_the_one_before_is_sent() -> None:
    # Both are ready at 1. Each alone takes 2 s, of which the link works 1.5 s: 1 + 0.5 + 2 · 1.5.
    lane = _lane(1.0, 1.0, total_s=1.0)
    flow = simulate([lane], [2.0, 2.0], latency_s=[0.5, 0.5], slots=1, overlap=Overlap())
    assert flow.collectives == ((1.0, 3.0), (2.5, 4.5))


def test_overlapped_compute_and_collective_slow_each_other() -> None:
    # e = 0.5, s = 2: from 1 on the collective runs at half speed, compute at 1 − 0.5/2 = 3/4;
    # the collective's 1 s takes 2 s, in which compute does 1.5 of its 3 s; 1.5 s remain.
    overlap = Overlap(exposed_ratio=0.5, collective_slowdown_ratio=2.0)
    flow = simulate([_lane(1.0, total_s=4.0)], [1.0], slots=1, overlap=overlap)
    assert flow.collectives == ((1.0, 3.0),)
    assert flow.end_s == pytest.approx(4.5)  # compute alone + exposed ratio × collective


def test_a_collective_waits_for_the_slowest_class_of_ranks() -> None:
    lanes = [_lane(1.0, total_s=1.0), _lane(2.5, total_s=2.5)]
    flow = simulate(lanes, [1.0], slots=1, overlap=Overlap())
    assert flow.collectives == ((2.5, 3.5),)
    assert flow.compute_end_s == (1.0, 2.5)


def test_a_slow_host_holds_the_device_back() -> None:
    # The host issues at 2, 4, 6; kernels of 1 s each end at 3, 5, 7.
    ends = two_lanes(np.full(3, 2.0), np.full(3, 1.0))
    assert ends.tolist() == [3.0, 5.0, 7.0]


def test_a_slow_device_runs_kernels_back_to_back() -> None:
    # The first is issued at 1; then the device is never without work.
    assert two_lanes(np.full(3, 1.0), np.full(3, 4.0)).tolist() == [5.0, 9.0, 13.0]


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
    ready = np.cumsum(work)
    lane = ComputeLane(ready_s=ready, total_s=float(ready[-1]))
    overlap = Overlap(exposed_ratio=exposed, collective_slowdown_ratio=slowdown)
    costs = cost[: len(work)]
    flow = simulate([lane], costs, slots=slots, overlap=overlap)
    assert flow.end_s >= max(lane.total_s, sum(costs)) * (1 - 1e-9)
    most = lane.total_s + sum(costs) * (1 + overlap.slowdown)
    assert flow.end_s <= most * (1 + 1e-9)
    starts = [start for start, _ in flow.collectives]
    assert starts == sorted(starts)


@given(
    work=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8),
    tail=st.floats(0.0, 1.0),
    cost=st.lists(st.floats(1e-6, 2.0), min_size=8, max_size=8),
    slots=st.integers(1, 3),
    exposed=st.floats(0.0, 3.0),
    slowdown=st.floats(1.0, 4.0),
    others=st.lists(st.floats(0.3, 2.0), max_size=3),
    latency=st.lists(st.floats(0.0, 0.5), min_size=8, max_size=8),
)
def test_the_closed_form_equals_the_event_simulation(
    work: list[float],
    tail: float,
    cost: list[float],
    slots: int,
    exposed: float,
    slowdown: float,
    others: list[float],
    latency: list[float],
) -> None:
    overlap = Overlap(exposed_ratio=exposed, collective_slowdown_ratio=slowdown)
    ready, costs = np.cumsum(work), np.array(cost[: len(work)])
    speeds = [1.0, *others]
    lanes = [
        ComputeLane(ready_s=ready * speed, total_s=float(ready[-1] + tail) * speed)
        for speed in speeds
    ]
    waits = costs * np.array(latency[: len(work)])
    flow = simulate(lanes, costs.tolist(), latency_s=waits.tolist(), slots=slots, overlap=overlap)
    slowest = max(speeds)
    lane_s = float(ready[-1] + tail) * slowest
    closed_s = lane_s + exposed_s(ready * slowest, lane_s, costs, waits, overlap)
    assert closed_s == pytest.approx(flow.end_s, rel=1e-9)
