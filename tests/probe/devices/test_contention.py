"""Contention from what ranks measured alone and together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator.kernels.contention import slowdown_ratio
from estimator.machines.profile import Contention, Provenance
from estimator.probe.devices.contention import rank_jitter_ratio, summarise
from tests.conftest import make_small_profile


def case(bound: str, size: int, alone_s: float, busy_s: float) -> dict[str, object]:
    return {"bound": bound, "bytes": size, "alone_s": alone_s, "busy_s": busy_s}


def test_each_rank_is_compared_with_itself_alone() -> None:
    fast = [case("memory", 100, 1.0, 1.5), case("compute", 10, 2.0, 2.0)]
    slow = [case("memory", 100, 4.0, 10.0), case("compute", 10, 3.0, 3.3)]
    memory, compute = summarise([fast, slow])
    # (1.5 + 2.5) / 2 and (1.0 + 1.1) / 2
    assert (memory.bound, memory.devices_busy) == ("memory", 2)
    assert memory.points == ((100.0, 2.0),)
    assert compute.points[0][1] == pytest.approx(1.05)


def test_only_what_sets_ranks_apart_for_many_windows_is_their_jitter() -> None:
    # Noise from window to window, and a machine that slows down for all, are none.
    one, two = (
        [{"windows_s": [0.9, 1.1, 1.0, 1.5, 1.0]}],
        [{"windows_s": [1.1, 0.9, 1.0, 1.0, 1.5]}],
    )
    assert rank_jitter_ratio([one, two]) == 0.0
    # Medians of 1.0 and 1.1: of two values one standard deviation is their distance over √2.
    slow = [{"windows_s": [1.1, 1.2, 1.1, 1.0, 1.1]}]
    assert rank_jitter_ratio([one, slow]) == pytest.approx(0.1 / 2**0.5 / 1.05)


def test_what_falls_with_the_bytes_moved_is_noise_of_the_measurement() -> None:
    points = ((1e5, 1.5), (1e6, 0.9), (1e7, 0.6), (1e8, 1.4))
    measured = Contention(
        bound="memory",
        devices_busy=2,
        points=points,
        provenance=Provenance(source="measured", samples=4),
    )
    profile = replace(make_small_profile(), contentions=(measured,))
    # The mean of the first three, which fall, is 1.0; between sizes by the logarithm.
    for size, ratio in ((1e5, 1.0), (1e7, 1.0), (1e7 * 10**0.5, 1.2), (1e8, 1.4)):
        assert slowdown_ratio(profile, "memory", 2, size) == pytest.approx(ratio)
