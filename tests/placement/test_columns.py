"""Columns of allocations say what their texts say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from estimator.errors import AllocationError
from estimator.placement.allocation import Allocation
from estimator.placement.columns import AllocationColumns

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
