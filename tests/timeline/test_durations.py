"""How busy neighbours slow operators down, on a synthetic machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator.engine import estimate_graph
from estimator.machines.profile import Contention, MachineProfile
from tests.synthetic import CHOSEN, Machine, perceptron


def test_what_fits_into_a_devices_cache_does_not_wait_for_busy_memory() -> None:
    # 16 MiB of cache for 9 devices; busy neighbours were measured at 100 MB alone, twice as slow.
    calm = Machine(memory_contention=1.0).profile()
    busy = Contention(bound="memory", devices_busy=2, points=((1e8, 2.0),), provenance=CHOSEN)
    loaded = replace(calm, contentions=(busy,))

    def forward_s(profile: MachineProfile, width: int) -> float:
        graph = perceptron([width] * 3, batch=4)
        return estimate_graph(graph, "1x2:synthetic", profile=profile).breakdown.forward_s

    assert forward_s(loaded, 64) == pytest.approx(forward_s(calm, 64))
    assert forward_s(loaded, 4096) > forward_s(calm, 4096)
