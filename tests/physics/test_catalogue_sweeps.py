"""What must hold of every machine of the catalogue, whatever its numbers are."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import estimator as est
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import CollectiveName, MachineProfile
from estimator.placement.mesh import whole_group
from estimator.placement.placement import place
from estimator.timeline.collectives.costs import GroupCollective
from tests.budgets import examples
from tests.synthetic import in_blocks, perceptron

FOLDER = Path(__file__).resolve().parents[2] / "data" / "machines"
PROFILES = [load_profile(path) for path in sorted(FOLDER.glob("*.json"))]
SEVERAL = [profile for profile in PROFILES if len(profile.devices) > 1]
NETWORKED = [profile for profile in PROFILES if profile.network]
STAGED = [
    profile
    for profile in SEVERAL
    if any(not link.peer_to_peer for link in profile.links) and len(profile.devices) >= 8
]
SIZES = (1e3, 1e6, 25e6, 1e9)
OPS: tuple[CollectiveName, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
ROUNDING = 1 + 1e-9
BLOCKS = replace(in_blocks(perceptron([2048] * 5)), target="cuda")


def by_name(profiles: list[MachineProfile]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("profile", profiles, ids=[each.name for each in profiles])


def collective_s(profile: MachineProfile, op: CollectiveName, where: str, size: float) -> float:
    group = whole_group(place(where, profile=profile))
    model = GroupCollective.of(profile, op, group)
    return model.time_s(size)


def faster(profile: MachineProfile, ratio: float) -> MachineProfile:
    """The machine with all its links that many times as fast."""
    rates = {
        name: tuple(
            replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * ratio)
            for link in getattr(profile, name)
        )
        for name in ("links", "network")
    }
    return replace(profile, **rates)


def over_network(profile: MachineProfile, ratio: float) -> MachineProfile:
    """The machine with a network, and cards of it, that many times as fast."""
    card = profile.hardware["nic_bit_per_s"]
    assert isinstance(card, int | float)
    hardware = {**profile.hardware, "nic_bit_per_s": card * ratio}
    return replace(faster(profile, ratio), links=profile.links, hardware=hardware)


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_no_collective_is_slower_over_a_faster_network(data: st.DataObject) -> None:
    profile = data.draw(st.sampled_from(NETWORKED))
    nodes = data.draw(st.sampled_from([2, 3, 4, 16, 64]))
    where = f"{nodes}x{data.draw(st.integers(1, len(profile.devices)))}:{profile.name}"
    ratio = 10 ** data.draw(st.floats(-1.3, 1.3))
    wider = ratio * data.draw(st.floats(1.01, 4.0))
    machines = [over_network(profile, each) for each in (ratio, wider)]
    op, size = data.draw(st.sampled_from(OPS)), 10 ** data.draw(st.floats(3, 9.5))
    slow_s, fast_s = (collective_s(each, op, where, size) for each in machines)
    assert fast_s <= slow_s * ROUNDING


@by_name(SEVERAL)
@pytest.mark.parametrize("op", OPS)
def test_no_collective_is_slower_over_faster_links(
    profile: MachineProfile, op: CollectiveName
) -> None:
    wheres = [f"1x{len(profile.devices)}:{profile.name}"]
    if profile.network:
        wheres += [f"{nodes}x{len(profile.devices)}:{profile.name}" for nodes in (2, 64)]
    for where in wheres:
        for size in SIZES:
            before_s = collective_s(profile, op, where, size)
            assert collective_s(faster(profile, 1.5), op, where, size) <= before_s


@by_name(PROFILES)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_no_step_is_slower_with_more_bandwidth(profile: MachineProfile, strategy: str) -> None:
    devices = tuple(
        replace(each, memory_bandwidth_bytes_per_s=1.5 * each.memory_bandwidth_bytes_per_s)
        for each in profile.devices
        if each.memory_bandwidth_bytes_per_s
    )
    assert len(devices) == len(profile.devices)
    wheres = [f"1x{len(devices)}:{profile.name}"]
    wheres += [f"4x{len(devices)}:{profile.name}"] if profile.network else []
    for where in wheres:
        steps = [
            est.estimate(BLOCKS, where, strategy=strategy, profile=each).step_time_s
            for each in (profile, faster(profile, 1.5), replace(profile, devices=devices))
        ]
        assert max(steps) == steps[0]


@by_name(SEVERAL)
def test_no_collective_is_faster_for_more_bytes(profile: MachineProfile) -> None:
    for where in {f"1x{used}:{profile.name}" for used in (2, len(profile.devices))}:
        times = [collective_s(profile, "all_reduce", where, size) for size in SIZES]
        assert times == sorted(times)


@by_name(STAGED)
def test_through_host_memory_eight_devices_are_no_faster_than_four(
    profile: MachineProfile,
) -> None:
    for size in SIZES:
        four = collective_s(profile, "all_reduce", f"1x4:{profile.name}", size)
        assert collective_s(profile, "all_reduce", f"1x8:{profile.name}", size) >= four


@by_name(NETWORKED)
def test_an_interval_is_not_narrower_at_a_thousand_devices_than_on_one_node(
    profile: MachineProfile,
) -> None:
    count = len(profile.devices)
    widths = []
    for nodes in (1, -(-1000 // count)):
        answer = est.estimate(BLOCKS, f"{nodes}x{count}:{profile.name}", profile=profile)
        widths.append(answer.high_s / answer.low_s)
    assert widths[1] >= widths[0]


@by_name(NETWORKED)
def test_more_nodes_never_raise_the_throughput_of_each(profile: MachineProfile) -> None:
    count = len(profile.devices)
    steps = [
        est.estimate(BLOCKS, f"{nodes}x{count}:{profile.name}", profile=profile).step_time_s
        for nodes in (1, 2, 4, 16, 64, 256, 2048)
    ]
    assert steps == sorted(steps)


@by_name(SEVERAL)
def test_a_larger_batch_never_lowers_throughput(profile: MachineProfile) -> None:
    where = f"1x{len(profile.devices)}:{profile.name}"
    rates = [
        est.estimate(BLOCKS, where, batch_per_gpu=batch, profile=profile).samples_per_s or 0.0
        for batch in (1, 4, 16, 64, 256, 1024)
    ]
    for smaller, larger in pairwise(rates):
        assert larger >= 0.98 * smaller


@pytest.mark.parametrize("name", ["a100-sxm-80gb", "dgx-1", "l40s", "rtx-4090"])
def test_sharding_moves_half_as_much_again_as_replicating(name: str) -> None:
    # Two gathers and a scatter of (n − 1)/n against an all-reduce of 2 (n − 1)/n.
    where = f"1x8:{name}"
    graph = replace(in_blocks(perceptron([16384] * 5)), target="cuda")
    slowest = {}
    for strategy in ("fsdp", "ddp"):
        plan = est.estimate(graph, where, strategy=strategy).plan
        slowest[strategy] = plan.alone_s(plan.kinds[0])
    assert slowest["fsdp"] / slowest["ddp"] == pytest.approx(1.5, rel=0.1)
