"""What operators, their host and the update take, on a synthetic machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator.cache import Cache
from estimator.engine import estimate_graph
from estimator.graph.op_graph import OpGraph
from estimator.graph.ops import OpTiming
from estimator.graph.optimizer_memory import update_call
from estimator.machines.profile import Contention, MachineProfile
from estimator.timeline.durations import op_durations
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


def test_the_host_waits_for_its_own_code_after_a_kernel_that_fills_the_private_caches() -> None:
    plain = Machine().profile()
    assert plain.host is not None
    assert plain.memory is not None
    cached = dict.fromkeys(_CACHED, 1e-6)
    profile = replace(
        plain,
        host=replace(plain.host, **cached),
        memory=replace(plain.memory, private_cache_bytes=1 << 20),
    )

    def host_s(machine: MachineProfile, width: int) -> list[float]:
        bound = perceptron([width] * 3, batch=4).at()
        found = op_durations(bound, machine, cache=Cache(limit_bytes=0)).host_s
        ready = {p.ready_after for p in bound.graph.parameters}
        return [s for n, s in enumerate(found.tolist()) if n and n not in ready]

    # A matmul with 64 x 64 weights moves 20 kB; one with 4096 x 4096 moves 67 MB.
    assert all(seconds <= 1e-6 for seconds in host_s(profile, 64))
    assert max(host_s(profile, 4096)) == pytest.approx(4e-6)
    assert host_s(plain, 64) == host_s(plain, 4096)


_CACHED = ("cached_forward_op_s", "cached_forward_view_s", "cached_backward_op_s")


def test_an_update_that_was_timed_takes_its_time_on_that_machine() -> None:
    graph = perceptron([64] * 3, batch=4)
    timed = replace(
        graph, timings={update_call(graph): OpTiming(seconds=0.25)}, timed_on="synthetic"
    )
    profile = Machine().profile()

    def update_s(asked: OpGraph, machine: MachineProfile) -> float:
        name = f"1x1:{machine.name}"
        return estimate_graph(asked, name, profile=machine).breakdown.update_s

    assert update_s(timed, profile) == pytest.approx(0.25)
    other = replace(profile, name="other")
    assert update_s(timed, other) == pytest.approx(update_s(graph, profile))
