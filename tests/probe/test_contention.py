"""Contention from what ranks measured alone and together."""

from __future__ import annotations

import pytest

from estimator.machines.profile import Device
from estimator.probe.contention import probe_contention, summarise


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


def test_one_device_has_nothing_to_contend_with() -> None:
    alone = Device(kind="cpu", index=0, name="core", memory_bytes=1, cores=(0,))
    assert probe_contention([alone], budget_s=1.0).contentions == ()
