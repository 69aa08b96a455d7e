"""Windows hold steps in steady state only, and end at 50 steps or after 5 seconds."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from estimator.calibrate.watching import Window, Windows


def fill(windows: Windows, times_s: Iterable[float]) -> list[Window]:
    """Every window that these step durations complete."""
    found = (windows.add(time_s, 1) for time_s in times_s)
    return [window for window in found if window is not None]


def test_the_first_five_steps_are_never_kept() -> None:
    windows = Windows()
    fill(windows, [0.01] * 5 + [0.02] * 20)
    assert windows.close() == Window(steps=20, step_time_s=0.02)
    assert windows.dropped_steps == 5


@pytest.mark.parametrize("first_s", [0.16, 0.0025])
def test_steps_are_dropped_until_the_steady_state(first_s: float) -> None:
    # The distance from 20 ms halves every four steps: from above as caches fill, from below as the
    # queue of an asynchronous device fills.
    settling = [0.02 * (first_s / 0.02) ** (0.5 ** (step / 4)) for step in range(30)]
    windows = Windows(warmup_steps=0)
    fill(windows, [*settling, *[0.02] * 9])
    window = windows.close()
    assert window is not None
    assert window.step_time_s == pytest.approx(0.02, rel=0.1)
    # The logarithm of the distance falls to 0.6 times in three steps: these agree within 10 % with
    # the three before once it was ln 1.1 / 0.4 = 0.24 or less, of ln 8 = 2.08, in the middle of
    # those: at step 12.5, so that they begin with step 11 to 13.
    assert 11 <= windows.dropped_steps <= 13


def test_a_loop_without_a_steady_state_is_kept_all_the_same() -> None:
    windows = Windows(warmup_steps=0)
    # Three long, three short: the last three never agree with the three before them.
    fill(windows, [0.04, 0.04, 0.04, 0.01, 0.01, 0.01] * 6)
    assert windows.close() is not None


def test_nothing_is_kept_of_a_loop_that_ends_before_its_steady_state() -> None:
    windows = Windows()
    fill(windows, [0.02] * 10)
    assert windows.close() is None
    assert windows.dropped_steps == 10


def test_a_window_ends_at_50_steps() -> None:
    windows = Windows(warmup_steps=0)
    assert [window.steps for window in fill(windows, [0.02] * 60)] == [50]


def test_a_window_ends_after_5_seconds() -> None:
    windows = Windows(warmup_steps=0)
    assert [window.steps for window in fill(windows, [0.5] * 12)] == [10]


def test_later_windows_are_twice_as_long_up_to_64_times() -> None:
    windows = Windows(warmup_steps=0)
    sizes = [window.steps for window in fill(windows, [0.02] * (3150 + 3 * 3200))]
    assert sizes == [50, 100, 200, 400, 800, 1600, 3200, 3200, 3200]


def test_a_window_is_the_median_of_its_steps() -> None:
    windows = Windows(warmup_steps=0)
    fill(windows, [1e-3] * 6)
    windows.close()
    # 11 steps from 10 to 20 ms, one after a long pause: median 15.
    fill(windows, [time_s / 1000 for time_s in (*range(10, 20), 9000)])
    window = windows.close()
    assert window is not None
    assert window.step_time_s == pytest.approx(0.015)


def test_a_clock_that_stands_still_gives_no_window() -> None:
    windows = Windows(warmup_steps=0)
    assert fill(windows, [0.0] * 60) == []
    assert windows.close() is None
