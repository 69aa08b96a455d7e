"""Two lanes in one awaited step, and in a loop of steps that nobody awaits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from numpy.typing import NDArray

from estimator.timeline.rank.lanes import MicroBatches

Seconds = NDArray[np.float64]


def micro_batches(
    host: Seconds, device: Seconds, count: int, *, is_shared: bool = False, more_s: float = 0.0
) -> MicroBatches:
    """Micro-batches of which the last has `more_s` more to do for the device in each op."""
    return MicroBatches(
        host_s=host,
        device_s=device,
        last_host_s=host,
        last_device_s=device + more_s,
        count=count,
        is_shared=is_shared,
    )


def one_step(host: Seconds, device: Seconds) -> MicroBatches:
    return micro_batches(host, device, 1)


def test_a_slow_host_holds_the_device_back() -> None:
    # The host issues at 2, 4, 6; kernels of 1 s each end at 3, 5, 7.
    lanes = one_step(np.full(3, 2.0), np.full(3, 1.0))
    assert lanes.ends_s(0).tolist() == [3.0, 5.0, 7.0]


def test_a_slow_device_runs_kernels_back_to_back() -> None:
    # The first is issued at 1; then the device is never without work.
    lanes = one_step(np.full(3, 1.0), np.full(3, 4.0))
    assert lanes.ends_s(0).tolist() == [5.0, 9.0, 13.0]


def test_a_slower_host_is_felt_once_the_device_waits_for_it() -> None:
    # Issued at 1.5, 3, 4.5 instead of 1, 2, 3: kernels of 1 s end 1.5 s later, those of 2 s only
    # 0.5 s, by which the first is begun later.
    assert one_step(np.full(3, 1.0), np.full(3, 1.0)).slower_host_s(0.5) == pytest.approx(1.5)
    assert one_step(np.full(3, 1.0), np.full(3, 2.0)).slower_host_s(0.5) == pytest.approx(0.5)


def test_a_step_bound_by_the_device_takes_what_the_device_has_to_do() -> None:
    # The host issues for 3 s and then the update for 1 s; the device works 8 s and updates for 2 s.
    host, device = np.array([2.0, 1.0]), np.array([3.0, 5.0])
    lanes = one_step(host, device)
    assert lanes.ends_s(0).tolist() == [5.0, 10.0]  # the device waits 2 s for the first op
    looped, update_s = lanes.looped(1.0, 2.0)
    end = looped.ends_s(0)
    assert end.tolist() == [3.0, 8.0]
    assert end[-1] + update_s == 10.0


def test_a_step_bound_by_the_host_takes_what_the_host_has_to_do() -> None:
    host, device = np.array([4.0, 4.0]), np.array([1.0, 1.0])
    looped, update_s = one_step(host, device).looped(3.0, 0.5)
    end = looped.ends_s(0)
    assert end.tolist() == [5.0, 9.0]
    assert end[-1] + update_s == pytest.approx(4.0 + 4.0 + 3.0)


def test_a_slow_tail_of_the_device_runs_into_the_next_step() -> None:
    # 6 s of host, 1 s in the update; 5.5 s of device, most of it issued last.
    host, device = np.array([3.0, 3.0]), np.array([0.5, 5.0])
    lanes = one_step(host, device)
    assert lanes.end_s == 11.0
    looped, update_s = lanes.looped(1.0, 1.0)
    end = looped.ends_s(0)
    assert end[-1] + update_s == pytest.approx(7.0)
    assert update_s >= 1.0
    assert np.all(np.diff(end, prepend=0.0) >= device - 1e-12)


times = some.lists(some.tuples(some.floats(0, 1), some.floats(0, 1)), min_size=1, max_size=5)


@given(times, some.integers(1, 6), some.booleans(), some.floats(0, 1), some.sets(some.integers(0)))
def test_ends_of_each_micro_batch_are_those_of_all_ops_in_a_row(
    ops: list[tuple[float, float]], count: int, is_shared: bool, more_s: float, waits: set[int]
) -> None:
    host, device = np.array(ops).T
    awaited = sorted({wait % len(ops) for wait in waits})
    lanes = replace(
        micro_batches(host, device, count, is_shared=is_shared, more_s=more_s),
        awaited=tuple(awaited),
    )
    row = np.concatenate([device] * (count - 1) + [device + more_s])
    whole, issued_s, end_s = [], 0.0, 0.0
    for place, (issue_s, work_s) in enumerate(zip(np.tile(host, count), row, strict=True)):
        issued_s += issue_s
        end_s = (end_s + issue_s if is_shared else max(end_s, issued_s)) + work_s
        issued_s = max(issued_s, end_s) if place % len(ops) in awaited else issued_s
        whole.append(end_s)
    each = [lanes.ends_s(number) for number in range(count)]
    assert np.concatenate(each) == pytest.approx(whole, rel=1e-12, abs=1e-12)


def test_ten_million_micro_batches_take_their_period_each() -> None:
    # The device has 2 s to do in each, the host 1 s; the first op is issued after 0.5 s.
    lanes = micro_batches(np.array([0.5, 0.5]), np.array([1.0, 1.0]), 10**7)
    assert lanes.end_s == pytest.approx(0.5 + 2e7)


def test_a_host_that_waits_issues_nothing_before_the_device_is_done() -> None:
    # Issued at 1 and 2, kernels of 4 s end at 5 and 9; the host waits for the first and issues the
    # second at 6: it ends at 10.
    lanes = one_step(np.full(2, 1.0), np.full(2, 4.0))
    assert lanes.ends_s(0).tolist() == [5.0, 9.0]
    assert replace(lanes, awaited=(0,)).ends_s(0).tolist() == [5.0, 10.0]
    assert replace(lanes, awaited=(0,), is_shared=True).ends_s(0).tolist() == [5.0, 10.0]


@given(times, some.integers(1, 4), some.sets(some.integers(0), min_size=1), some.floats(0, 2),
       some.floats(0, 2))  # fmt: skip
def test_a_loop_whose_host_waits_takes_as_long_as_its_events(
    ops: list[tuple[float, float]], count: int, waits: set[int], host_s: float, device_s: float
) -> None:
    host, device = np.array(ops).T
    awaited = tuple(sorted({wait % len(ops) for wait in waits}))
    lanes = replace(micro_batches(host, device, count), awaited=awaited)
    looped, update_s = lanes.looped(host_s, device_s)
    begins, issued_s, end_s = [], 0.0, 0.0
    for _ in range(4):
        begins.append(end_s)
        ends = []
        for place, (issue_s, work_s) in enumerate(
            zip(*np.tile([host, device], count), strict=True)
        ):
            issued_s += issue_s
            end_s = max(end_s, issued_s) + work_s
            issued_s = max(issued_s, end_s) if place % len(ops) in awaited else issued_s
            ends.append(end_s)
        issued_s += host_s
        end_s = max(end_s + device_s, issued_s)
    assert looped.end_s + update_s == pytest.approx(begins[3] - begins[2], abs=1e-9)
    each = np.concatenate([looped.ends_s(number) for number in range(count)])
    assert each == pytest.approx(np.array(ends) - begins[3], abs=1e-9)
