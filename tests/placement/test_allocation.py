"""Allocations: parsing and printing are inverse, and what does not exist is refused."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as some

from estimator.errors import AllocationError
from estimator.placement.allocation import Allocation, DeviceGroup

names = some.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,8}", fullmatch=True)
counted = some.builds(
    DeviceGroup,
    nodes=some.integers(1, 99),
    devices_per_node=some.integers(1, 99),
    machine=names,
)
explicit = some.builds(
    lambda host, devices: DeviceGroup(
        nodes=1, devices_per_node=len(devices), host=host, devices=tuple(devices)
    ),
    host=names,
    devices=some.lists(some.integers(0, 99), min_size=1, max_size=6, unique=True),
)
groups = some.lists(counted | explicit, min_size=1, max_size=5)


@given(groups)
def test_parsing_undoes_printing(listed: list[DeviceGroup]) -> None:
    hosts = [(group.host, device) for group in listed for device in group.devices]
    assume(len(set(hosts)) == len(hosts))
    allocation = Allocation(tuple(listed))
    assert Allocation.parse(str(allocation)) == allocation


@given(groups, some.sampled_from(["+", " + ", "  +"]))
def test_spaces_around_groups_do_not_matter(listed: list[DeviceGroup], plus: str) -> None:
    hosts = [(group.host, device) for group in listed for device in group.devices]
    assume(len(set(hosts)) == len(hosts))
    text = plus.join(map(str, listed))
    assert str(Allocation.parse(text)) == "+".join(map(str, listed))


def test_ranks_and_nodes_add_up_over_groups() -> None:
    # 1 node of 8 and 2 nodes of 4: 3 nodes, 8 + 2 * 4 = 16 ranks.
    allocation = Allocation.parse("1x8:v100-sxm+2x4:t4-g4dn")
    assert (allocation.nodes, allocation.ranks) == (3, 16)
    assert [size for _, size in allocation.node_sizes()] == [8, 4, 4]


def test_a_device_cannot_be_used_twice() -> None:
    with pytest.raises(AllocationError, match="twice"):
        Allocation.parse("a1[0,0]")
    with pytest.raises(AllocationError, match="twice"):
        Allocation.parse("a1[0]+a2[0]+a1[1,0]")
