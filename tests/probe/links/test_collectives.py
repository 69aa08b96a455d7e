"""Collectives are timed from the last rank's entry to the last rank's end."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import get_args

import pytest
from pydantic import TypeAdapter

from estimator.machines.profile import CollectiveName, Device
from estimator.probe.cluster.findings import ClusterFindings
from estimator.probe.devices.ranks import DeviceProcesses
from estimator.probe.links.collectives import blocking_points, collective_cost
from estimator.probe.links.copies import host_copies, link_from
from estimator.probe.links.overlap import overlap_cost
from estimator.units import MIB

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
DEVICES = tuple(
    Device(kind="cpu", index=rank, name="core", memory_bytes=1 << 30, cores=tuple(CORES[rank:][:1]))
    for rank in range(2)
)


def test_a_collective_takes_from_the_last_entry_to_the_last_end() -> None:
    # Rank 1 comes 3 s late and rank 0 leaves last: 10 - 3 = 7 s for 100 bytes; 200 bytes take 12 s.
    rank0 = [(100, 0.0, 10.0), (200, 20.0, 32.0)]
    rank1 = [(100, 3.0, 9.0), (200, 20.0, 31.0)]
    cost = collective_cost("all_reduce", "gloo", [rank0, rank1])
    assert cost is not None
    assert cost.points == ((100, 7.0), (200, 12.0))
    # The line through both: 5 s per 100 bytes, 2 s at no size.
    assert cost.latency_s == pytest.approx(2.0)
    assert cost.bandwidth_bytes_per_s == pytest.approx(20.0)


def test_calls_of_gloo_in_two_modes_count_by_their_mean() -> None:
    # 0.4 ms or a time slice more, by turns; the largest size takes 5 ms each time.
    small = [(1024, 0.0, taken_s) for taken_s in (0.4e-3, 4.4e-3) * 10]
    larger = [(64 * MIB, 0.0, 5e-3)] * 20
    points = [
        cost.points[0][1]
        for backend in ("gloo", "nccl")
        if (cost := collective_cost("all_reduce", backend, [small + larger] * 2))
    ]
    assert points == pytest.approx([2.4e-3, 0.4e-3])


def test_means_of_gloo_do_not_fall_as_sizes_rise() -> None:
    # 3 and 2 ms of two calls and one: (2 × 3 + 2) / 3.
    windows = [(1024, 0.0, 3e-3)] * 2 + [(4096, 0.0, 2e-3), (16384, 0.0, 9e-3)]
    cost = collective_cost("all_reduce", "gloo", [windows] * 2)
    assert cost is not None
    assert dict(cost.points) == pytest.approx({1024: 8e-3 / 3, 4096: 8e-3 / 3, 16384: 9e-3})


def test_calls_in_a_row_share_their_time() -> None:
    windows = [(100, 0.0, 10.0, 5), (200, 20.0, 32.0, 1)]
    cost = collective_cost("all_reduce", "gloo", [windows] * 2)
    assert cost is not None
    assert cost.points == ((100, pytest.approx(2.0)), (200, pytest.approx(12.0)))


def test_a_blocking_call_takes_from_the_mean_entry_to_the_last_end() -> None:
    # (seconds asked to compute, bytes, begun to compute, entered, left)
    rank0 = [(1.0, 100, 0.0, 1.0, 4.0), (1.0, 400, 10.0, 11.0, 19.0)]
    rank1 = [(1.0, 100, 0.5, 2.0, 5.0), (1.0, 400, 10.0, 12.0, 18.0)]
    # Ranks compute 1.25 and 1.5 s; 5 - 1.5 and 19 - 11.5 s.
    assert blocking_points("gloo", [rank0, rank1]) == ((1.375, 100, 3.5), (1.375, 400, 7.5))


def test_one_size_alone_is_no_collective_cost() -> None:
    assert collective_cost("broadcast", "gloo", [[(100, 0.0, 1.0)]] * 2) is None


def step_of_node(step: str, seconds: float) -> ClusterFindings:
    """What two core groups find in one of the steps of a node."""
    found: list[ClusterFindings] = []
    arguments = {
        "step": step,
        "devices": [asdict(device) for device in DEVICES],
        "at": "now",
        "seconds": seconds,
    }
    with DeviceProcesses(DEVICES, world=True) as ranks:
        ranks.run(
            "estimator.probe.node:run_on_node",
            arguments,
            timeout_s=120.0,
            on_report=lambda _, message: found.append(
                TypeAdapter(ClusterFindings).validate_python(message)
            ),
        )
    return found[-1]


def test_every_collective_of_two_core_groups_is_measured_or_named_as_missing() -> None:
    found = step_of_node("collectives", 0.1)
    by_op = {cost.op: cost for cost in found.collectives}
    assert len(by_op) + len(found.missing) == len(get_args(CollectiveName))
    reduced = by_op["all_reduce"]
    assert (reduced.group_size, reduced.nodes, reduced.hosts) == (2, 1, ())
    # However little time there is.
    assert [size for size, _ in reduced.points] == [1024 * 4**power for power in range(9)]
    # Gloo sums on the ranks' own cores: 64 MiB through one core at less than 100 GB/s.
    assert reduced.points[-1][1] > (64 << 20) * 1e-11
    # Some computing before a call takes time, none does not.
    windows_s = sorted({window_s for window_s, _, _ in reduced.blocking})
    assert windows_s[0] < 1e-4 < windows_s[1] < windows_s[2]
    assert [size for _, size, _ in reduced.blocking] == 3 * [32 << 10, 512 << 10, 4 << 20]
    assert not by_op["broadcast"].blocking


def test_core_groups_of_a_node_are_joined_by_one_loopback() -> None:
    (link,) = step_of_node("copies", 0.5).links
    assert (link.kind, link.locality, link.flows) == ("loopback", "node", 1)
    assert link.points[0][0] == 1024


def test_two_core_groups_contend_for_what_they_share() -> None:
    found = step_of_node("contention", 0.5)
    # As far as the time goes; what most of a step runs comes first.
    assert "compute" in {cost.bound for cost in found.contentions}
    assert {cost.devices_busy for cost in found.contentions} == {2}
    assert found.rank_jitter_ratio is not None


def test_overlap_compares_together_with_apart_round_by_round() -> None:
    # Compute 10 s, all-reduce 4 s, together 13 s: 3 of the 4 s are exposed; beside compute the
    # all-reduce takes 8 s instead of 4. The second rank is never the last and does not count.
    slow = {"compute_s": 10.0, "collective_s": 4.0, "both_s": 13.0, "beside_s": 8.0}
    fast = {"compute_s": 7.0, "collective_s": 3.0, "both_s": 12.0, "beside_s": 5.0}
    case = {"compute": "memory_bound", "size_bytes": 1 << 20, "in_flight": 2}
    cost = overlap_cost([{**case, "rounds": [each] * 3} for each in (slow, fast)], "gloo")
    assert cost.exposed_ratio == pytest.approx(0.75)
    assert cost.collective_slowdown_ratio == pytest.approx(2.0)
    assert cost.size_bytes == 2 << 20
    assert cost.group_size == 2


def test_every_overlap_case_of_two_core_groups_is_measured() -> None:
    costs = step_of_node("overlap", 0.1).overlaps
    assert {(cost.compute, cost.size_bytes >> 20) for cost in costs} == {
        (bound, size) for bound in ("compute_bound", "memory_bound") for size in (0, 4, 25)
    }
    assert {(cost.group_size, cost.nodes) for cost in costs} == {(2, 1)}


class _SteadyLink:
    """A device whose copies take 10 µs and 1 s per 4 GB, 8 GB/s out of pinned memory."""

    kind = "cuda"
    index = 0
    device = "somewhere"

    def __init__(self) -> None:
        self.copied: list[tuple[str, str]] = []

    def synchronize(self) -> None: ...

    def time_calls(self, call, *, repeats):  # type: ignore[no-untyped-def]
        self.copied.clear()
        call(0)
        (size, pinned) = self.copied[0]
        return [10e-6 + size / (8e9 if pinned else 4e9)] * repeats


class _FakeTorch:
    uint8 = "uint8"

    def __init__(self, link: _SteadyLink) -> None:
        self.link = link

    def ones(self, size, *, dtype, device=None, pin_memory=None):  # type: ignore[no-untyped-def]
        return _FakeTensor(self.link, size, pin_memory)


class _FakeTensor:
    def __init__(self, link, size, pinned) -> None:  # type: ignore[no-untyped-def]
        self.link, self.size, self.pinned = link, size, pinned

    def copy_(self, source, *, non_blocking):  # type: ignore[no-untyped-def]
        assert non_blocking
        assert (self.pinned is None) != (source.pinned is None), "one end is on the device"
        self.link.copied.append((self.size, bool(self.pinned or source.pinned)))


def test_host_copies_of_a_steady_link_give_its_rates_back() -> None:
    link = _SteadyLink()
    met: list[None] = []
    found = host_copies(link, _FakeTorch(link), meet=lambda: met.append(None), budget_s=0.1)
    assert len(met) == 4 * 6
    rates = {
        (one["kind"], one["pinned"]): link_from("h2d", one["points"], pinned=one["pinned"])
        for one in found
    }
    assert set(rates) == {("h2d", True), ("h2d", False), ("d2h", True), ("d2h", False)}
    assert rates["h2d", True].bandwidth_bytes_per_s == pytest.approx(8e9, rel=1e-3)
    assert rates["d2h", False].bandwidth_bytes_per_s == pytest.approx(4e9, rel=1e-3)
    assert rates["d2h", False].latency_s == pytest.approx(10e-6, rel=1e-3)
