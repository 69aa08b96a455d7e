"""Collective costs from measured points."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from estimator.machines.profile import CollectiveCost, Device, MachineProfile, Provenance
from estimator.placement.mesh import ProcessGroup
from estimator.timeline.collectives.costs import GroupCollective, monotone

MEASURED = Provenance(source="measured", relative_error=0.05)


def one_node(ranks: int) -> ProcessGroup:
    return ProcessGroup(ranks=ranks, nodes=1, per_node=ranks)


def _profile(*points: tuple[float, float]) -> MachineProfile:
    cost = CollectiveCost(
        op="all_reduce",
        backend="gloo",
        group_size=2,
        points=points,
        latency_s=1e-4,
        bandwidth_bytes_per_s=1e9,
        provenance=MEASURED,
    )
    device = Device(kind="cpu", index=0, name="c", memory_bytes=1 << 30)
    return MachineProfile(name="m", devices=(device,), collectives=(cost,), provenance=MEASURED)


def test_a_measured_size_takes_what_was_measured() -> None:
    model = GroupCollective.of(_profile((1e3, 1e-4), (1e6, 1e-3)), "all_reduce", one_node(2))
    assert model.time_s(1e6) == pytest.approx(1e-3)


def test_between_sizes_the_correction_of_the_formula_is_interpolated_on_logarithms() -> None:
    # The fit says 0.11 ms and 1.1 ms where 0.1 ms and 10 ms were measured; at 1e5 it says 0.2 ms.
    model = GroupCollective.of(_profile((1e4, 1e-4), (1e6, 1e-2)), "all_reduce", one_node(2))
    assert model.time_s(1e5) == pytest.approx(2e-4 * math.sqrt((0.1 / 0.11) * (10 / 1.1)))


def test_beyond_the_largest_size_time_rises_on_the_line_of_the_points() -> None:
    # The formula says 1.1 ms for 1 MB; a latency that was measured too long is no rate.
    model = GroupCollective.of(_profile((1e3, 1e-9), (1e6, 1e-3)), "all_reduce", one_node(2))
    assert model.time_s(4e6) == pytest.approx(4e-3, rel=1e-2)
    assert model.time_s(1e9) == pytest.approx(1.0, rel=1e-2)


def test_beyond_points_of_mere_latency_time_rises_as_the_formula_says() -> None:
    # 1 GB/s: 4 MB take 4 ms more than 4 kB, whatever the slope of two latencies.
    model = GroupCollective.of(_profile((1e3, 2e-3), (4e3, 2.1e-3)), "all_reduce", one_node(2))
    assert model.time_s(4**5 * 4e3) == pytest.approx(2.1e-3 + (4**5 - 1) * 4e-6, rel=1e-9)


def test_a_smaller_message_never_takes_longer_than_a_larger_one() -> None:
    assert monotone([(4, 2.0), (1, 3.0), (8, 5.0)]) == ((1, 2.0), (4, 2.0), (8, 5.0))


def test_two_collectives_at_once_tell_how_much_of_one_is_latency() -> None:
    # Two of 1 kB take 1.4 ms where one takes 1 ms: 0.6 ms of each pass beside the other.
    profile = _profile((1e3, 1e-3), (1e6, 4e-3))
    cost = replace(profile.collectives[0], pair_ratio=((1e3, 1.4), (1e6, 1.9)))
    model = GroupCollective.of(replace(profile, collectives=(cost,)), "all_reduce", one_node(2))
    found = model.corrections.latency_at(np.array([1e3, 1e6]))
    assert found == pytest.approx([0.5, 0.6 / 4])  # two threads: never more than half


def test_an_unmeasured_group_is_scaled_as_a_ring() -> None:
    # 2 → 4 ranks: bytes on the wire 1 → 1.5 buffers, rounds of latency 2 → 6.
    model = GroupCollective.of(_profile((1e8, 0.1001)), "all_reduce", one_node(4))
    assert model.source == "fitted"
    assert model.time_s(1e8) == pytest.approx(6 / 2 * 1e-4 + 0.1 * 1.5)


def test_what_was_never_measured_has_no_cost() -> None:
    assert GroupCollective.of(_profile((1e6, 1e-3)), "broadcast", one_node(2)) is None


def test_gloo_runs_an_all_reduce_for_a_reduce_scatter() -> None:
    # Carried over from two ranks to four as an all-reduce: 1.5 times the bytes, not 3 times.
    model = GroupCollective.of(_profile((1e8, 0.1001)), "reduce_scatter", one_node(4))
    assert model.time_s(1e8) == pytest.approx(6 / 2 * 1e-4 + 0.1 * 1.5)


def test_a_reduce_scatter_that_was_measured_over_the_group_is_believed() -> None:
    profile = _profile((1e6, 1e-3))
    own = replace(profile.collectives[0], op="reduce_scatter", points=((1e6, 1.2e-3),))
    known = replace(profile, collectives=(*profile.collectives, own))
    model = GroupCollective.of(known, "reduce_scatter", one_node(2))
    assert model.time_s(1e6) == pytest.approx(1.2e-3)
