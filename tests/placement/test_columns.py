"""Columns of allocations say what their texts say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as some

from estimator.advise.scaling import expand_pattern
from estimator.errors import AllocationError
from estimator.placement.allocation import Allocation, DeviceGroup
from estimator.placement.columns import AllocationColumns, AllocationGrid

groups = some.one_of(
    some.builds(
        lambda nodes, devices, name: f"{nodes}x{devices}:{name}",
        some.integers(1, 99),
        some.integers(1, 16),
        some.sampled_from(["v100-sxm2-16gb", "t4", "h100.b"]),
    ),
    some.builds(
        lambda host, count: f"{host}[{','.join(map(str, range(count)))}]",
        some.sampled_from(["a1", "a2", "a3", "a4"]),
        some.integers(1, 4),
    ),
)
texts = some.lists(groups, min_size=1, max_size=4, unique_by=lambda text: text[:2]).map("+".join)


@given(some.lists(texts, min_size=1, max_size=8))
def test_texts_read_into_columns_are_the_allocations_they_parse_to(rows: list[str]) -> None:
    columns = AllocationColumns.from_texts(rows)
    assert len(columns) == len(rows)
    assert [columns.allocation(row) for row in range(len(rows))] == list(
        map(Allocation.parse, rows)
    )


def test_a_part_of_the_rows_is_a_view() -> None:
    columns = AllocationColumns.from_texts(["1x1:a", "2x2:a", "3x3:b+4x4:a"])
    some_rows = columns[1:]
    assert str(some_rows.allocation(1)) == "3x3:b+4x4:a"
    assert np.shares_memory(some_rows.machine, columns.machine)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "row 1: '' is not an allocation"),
        ("2x4", "row 1: '2x4' is not an allocation"),
        ("1x0:a", "row 1: '1x0:a' asks for no device"),
        ("1x1:a+", "row 1: '1x1:a\\+' is not an allocation"),
        ("h[0]+h[0]", "row 1: device 0 of 'h' is listed twice"),
        ("h[0,0]", "row 1: .*twice"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused_by_its_row(text: str, said: str) -> None:
    with pytest.raises(AllocationError, match=f"^{said}"):
        AllocationColumns.from_texts(["1x1:a", text, "1x1:a"])


def test_spaces_around_groups_mean_nothing() -> None:
    columns = AllocationColumns.from_texts([" 1x8:a + 2x4:b "])
    assert str(columns.allocation(0)) == "1x8:a+2x4:b"


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ([[0, -1], [2, -1]], r"row 1 has machine numbers \[2, -1\] of 2 machines"),
        ([[0, 1], [-1, 0]], "row 1 has no group, or a gap before one"),
        ([[-1, -1], [0, -1]], "row 0 has no group"),
    ],
)
def test_columns_that_name_no_site_are_refused_by_their_row(
    machine: list[list[int]], said: str
) -> None:
    ones = np.ones((2, 2), dtype=int)
    with pytest.raises(AllocationError, match=said):
        AllocationColumns(machines=("a", "b"), machine=np.array(machine), nodes=ones, devices=ones)


def test_columns_must_be_integers_of_one_shape() -> None:
    ones = np.ones((2, 2), dtype=int)
    with pytest.raises(AllocationError, match="column 'nodes' is float64"):
        AllocationColumns(machines=("a",), machine=ones - 1, nodes=ones * 0.5, devices=ones)


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
allocation_groups = some.lists(counted | explicit, min_size=1, max_size=5)


@given(allocation_groups)
def test_parsing_undoes_printing(listed: list[DeviceGroup]) -> None:
    hosts = [(group.host, device) for group in listed for device in group.devices]
    assume(len(set(hosts)) == len(hosts))
    allocation = Allocation(tuple(listed))
    assert Allocation.parse(str(allocation)) == allocation


@given(allocation_groups, some.sampled_from(["+", " + ", "  +"]))
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


counts = some.sampled_from(["1", "2..4", "1,3,5", "1..2,8", "3,3"])
grid_groups = some.one_of(
    some.tuples(counts, counts, some.sampled_from(["t4", "v100-sxm"])).map(
        lambda parts: f"{parts[0]}x{parts[1]}:{parts[2]}"
    ),
    some.sampled_from(["a1[0,1]", "a2[3]"]),
)
patterns = some.lists(grid_groups, min_size=1, max_size=3, unique_by=lambda text: text[:2]).map(
    "+".join
)


@given(patterns)
def test_rows_are_those_that_the_pattern_writes_out(pattern: str) -> None:
    grid, texts = AllocationGrid(pattern), list(expand_pattern(pattern))
    assert len(grid) == len(texts)
    assert [grid.text(row) for row in range(len(grid))] == texts
    whole, written = grid[:], AllocationColumns.from_texts(texts)
    assert [whole.allocation(row) for row in range(len(whole))] == [
        written.allocation(row) for row in range(len(texts))
    ]


def test_two_nodes_by_three_devices_by_four_nodes_are_24_rows() -> None:
    grid = AllocationGrid("1..2x1,2,4:t4+5..8x8:v100-sxm")
    assert len(grid) == 24
    # Row 13: 13 = 3 * 4 + 1, the fourth of the first group (2x1), the second of the last (6x8).
    assert grid.text(13) == "2x1:t4+6x8:v100-sxm"
    some_rows = grid[np.array([13, 0])]
    assert some_rows.nodes.tolist() == [[2, 6], [1, 5]]
    assert some_rows.devices.tolist() == [[1, 8], [1, 8]]


def test_a_grid_of_a_trillion_rows_is_counted_not_held() -> None:
    grid = AllocationGrid("1..10000x1..100:t4+1..10000x1..100:v100-sxm")
    assert len(grid) == 10**12
    last = grid[10**12 - 1 : 10**12]
    assert last.nodes.tolist() == [[10_000, 10_000]]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("2..1x8:t4", "write a range such as 1..8"),
        ("1..100000x1..100000:a+1..100000x1..100000:b", "more than 2"),
    ],
)
def test_what_is_no_grid_is_refused(pattern: str, said: str) -> None:
    with pytest.raises(AllocationError, match=said):
        AllocationGrid(pattern)


def test_a_row_that_is_not_there_is_refused() -> None:
    with pytest.raises(AllocationError, match="ask for row 0 to 3, not 4"):
        AllocationGrid("1..2x1..2:t4").text(4)
