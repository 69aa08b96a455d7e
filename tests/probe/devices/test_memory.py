"""Memory facts that are known beforehand."""

from __future__ import annotations

from typing import Any

import pytest

from estimator.machines.profile import Device
from estimator.probe.devices.backend import CpuBackend
from estimator.probe.devices.memory import cache_sizes, measure_cold_read, measure_first_touch


def device(cores: tuple[int, ...]) -> Device:
    return Device(kind="cpu", index=0, name="cores", memory_bytes=1, cores=cores)


HARDWARE = {
    "l1_cache_bytes": 32 << 10,
    "l1_cache_shared_by_threads": 1,
    "l2_cache_bytes": 1 << 20,
    "l2_cache_shared_by_threads": 1,
    "l3_cache_bytes": 32 << 20,
    "l3_cache_shared_by_threads": 8,
}


def test_one_core_has_its_own_second_level_and_alone_the_whole_last_one() -> None:
    assert cache_sizes(HARDWARE, device((0,))) == (1 << 20, 32 << 20)


def test_a_group_over_two_last_level_caches_has_both() -> None:
    assert cache_sizes(HARDWARE, device(tuple(range(16)))) == (16 << 20, 64 << 20)


def test_fresh_memory_costs_a_page_fault_per_page() -> None:
    emitted: list[dict[str, Any]] = []
    measure_first_touch(CpuBackend(), emitted.append, budget_s=0.0)
    (found,) = emitted
    # From 0.1 µs to 40 µs for a page of 4 KiB: anything else is another unit.
    assert 1e-7 / 4096 < found["first_touch_s_per_byte"] < 4e-5 / 4096


def test_reads_cost_more_the_more_was_read_since(monkeypatch: pytest.MonkeyPatch) -> None:
    # A cache of 32 MiB: pieces of a block of 128 MiB are read, of which others are 127.5.
    monkeypatch.setattr(CpuBackend, "last_level_cache_bytes", lambda self: 32 << 20)
    emitted: list[dict[str, Any]] = []
    measure_cold_read(CpuBackend(), emitted.append, budget_s=0.0)
    _, found = emitted
    distances, shares = zip(*found["reuse_points"], strict=True)
    assert [each / (1 << 20) for each in distances] == [1, 2, 4, 8, 16, 32, 127.5]
    assert sorted(shares) == list(shares)
    assert shares[0] < 1 == shares[-1]


def test_where_time_is_short_cold_reads_are_few_and_told_before_reuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CpuBackend, "last_level_cache_bytes", lambda self: 32 << 20)
    heard: list[Any] = []

    class Counting(CpuBackend):
        def time_calls(self, *args: Any, repeats: int, **named: Any) -> list[float]:
            heard.append(repeats)
            return super().time_calls(*args, repeats=repeats, **named)

    for budget_s, reads in ((0.0, 64), (60.0, 255)):
        heard.clear()
        measure_cold_read(Counting(), heard.append, budget_s=budget_s)
        first = next(place for place, each in enumerate(heard) if isinstance(each, dict))
        # As many are read warm. 128 MiB are 256 pieces, one of which is left out.
        assert sum(heard[:first]) == 2 * reads
        assert "cold_read_s_per_byte" in heard[first]
        assert "reuse_points" in heard[-1]
