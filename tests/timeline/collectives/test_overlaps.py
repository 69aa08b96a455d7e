"""Compute beside collectives is slowed by what it was measured beside, size by size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from estimator.cache import Cache
from estimator.machines.profile import OverlapCost
from estimator.placement.mesh import ProcessGroup
from estimator.timeline.collectives.overlap import OverlapCosts
from tests.synthetic import CHOSEN, Machine

PAIR = ProcessGroup(ranks=2, nodes=1, per_node=2)
KIB, MIB = 1 << 10, 1 << 20


def beside(size_bytes: int, in_flight: int, exposed: float, slowdown: float) -> OverlapCost:
    return OverlapCost(
        compute="compute_bound",
        backend="gloo",
        group_size=2,
        size_bytes=size_bytes * in_flight,
        in_flight=in_flight,
        exposed_ratio=exposed,
        collective_slowdown_ratio=slowdown,
        provenance=CHOSEN,
    )


# All-reduces of 1 ms and a second per GB, measured beside compute at 64 KiB, 8 at once, and 16 MiB.
PROFILE = replace(
    Machine(devices=2, latency_s=1e-3, bandwidth_bytes_per_s=1e9).profile(),
    overlaps=(beside(64 * KIB, 8, 0.3, 1.0), beside(16 * MIB, 1, 0.7, 2.0)),
)


def ratios(*sizes_bytes: float) -> tuple[float, float]:
    found = OverlapCosts([PROFILE], np.array(sizes_bytes), Cache(limit_bytes=0)).overlap(PAIR, 1.0)
    return float(found.exposed_ratio), float(found.slowdown)


@pytest.mark.parametrize(
    ("size_bytes", "exposed", "slowdown"),
    [
        (1 * KIB, 0.3, 1.0),
        (64 * KIB, 0.3, 1.0),
        # Halfway by the logarithm.
        (1 * MIB, 0.5, 1.5),
        (16 * MIB, 0.7, 2.0),
        (64 * MIB, 0.7, 2.0),
    ],
)
def test_each_size_is_between_those_measured(
    size_bytes: int, exposed: float, slowdown: float
) -> None:
    assert ratios(size_bytes) == pytest.approx((exposed, slowdown))


def test_collectives_of_unlike_sizes_count_by_their_time() -> None:
    # 1 ms + 0.066 ms and 1 ms + 16.8 ms.
    small_s, large_s = 1e-3 + 64 * KIB / 1e9, 1e-3 + 16 * MIB / 1e9
    expected = (0.3 * small_s + 0.7 * large_s) / (small_s + large_s)
    assert ratios(64 * KIB, 16 * MIB)[0] == pytest.approx(expected)


def test_a_step_without_collectives_has_some_overlap() -> None:
    assert ratios(0.0) == pytest.approx((0.7, 2.0))
