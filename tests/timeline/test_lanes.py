"""Two lanes in one awaited step, and in a loop of steps that nobody awaits."""

from __future__ import annotations

import numpy as np
import pytest

from estimator.timeline.lanes import looped, two_lanes


def test_a_step_bound_by_the_device_takes_what_the_device_has_to_do() -> None:
    # The host issues for 3 s and then the update for 1 s; the device works 8 s and updates for 2 s.
    host, device = np.array([2.0, 1.0]), np.array([3.0, 5.0])
    alone = two_lanes(host, device)
    assert alone.tolist() == [5.0, 10.0]  # the device waits 2 s for the first op
    end, update_s = looped(alone, host, device, 1.0, 2.0)
    assert end.tolist() == [3.0, 8.0]
    assert end[-1] + update_s == 10.0


def test_a_step_bound_by_the_host_takes_what_the_host_has_to_do() -> None:
    host, device = np.array([4.0, 4.0]), np.array([1.0, 1.0])
    end, update_s = looped(two_lanes(host, device), host, device, 3.0, 0.5)
    assert end.tolist() == [5.0, 9.0]
    assert end[-1] + update_s == pytest.approx(4.0 + 4.0 + 3.0)


def test_a_slow_tail_of_the_device_runs_into_the_next_step() -> None:
    # 6 s of host, 1 s in the update; 5.5 s of device, most of it issued last.
    host, device = np.array([3.0, 3.0]), np.array([0.5, 5.0])
    alone = two_lanes(host, device)
    assert alone[-1] == 11.0
    end, update_s = looped(alone, host, device, 1.0, 1.0)
    assert end[-1] + update_s == pytest.approx(7.0)
    assert update_s >= 1.0
    assert np.all(np.diff(end, prepend=0.0) >= device - 1e-12)
