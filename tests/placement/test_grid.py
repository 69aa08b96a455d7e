"""A grid's rows are the allocations that its pattern writes out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from estimator.advise.scaling import expand_pattern
from estimator.errors import AllocationError
from estimator.placement.columns import AllocationColumns, AllocationGrid

counts = some.sampled_from(["1", "2..4", "1,3,5", "1..2,8", "3,3"])
groups = some.one_of(
    some.tuples(counts, counts, some.sampled_from(["t4", "v100-sxm"])).map(
        lambda parts: f"{parts[0]}x{parts[1]}:{parts[2]}"
    ),
    some.sampled_from(["a1[0,1]", "a2[3]"]),
)
patterns = some.lists(groups, min_size=1, max_size=3, unique_by=lambda text: text[:2]).map("+".join)


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
