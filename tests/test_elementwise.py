"""Functions of floats or arrays: what kind goes in comes out, and both say the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.elementwise import (
    exp,
    expected_maximum,
    log,
    log1p,
    logaddexp,
    maximum,
    minimum,
    sqrt,
    where,
)

# Each with a pair of arguments and the answer worked out by hand.
ONE: list[tuple[Callable[..., Any], float, float]] = [
    (exp, math.log(3.0), 3.0),
    (log, math.e**2, 2.0),
    (log1p, math.e - 1, 1.0),
    (sqrt, 9.0, 3.0),
]
TWO: list[tuple[Callable[..., Any], float, float, float]] = [
    (maximum, 1.0, 2.0, 2.0),
    (maximum, 2.0, -3.0, 2.0),
    (minimum, 1.0, 2.0, 1.0),
    (minimum, 2.0, -3.0, -3.0),
    (logaddexp, math.log(1.0), math.log(3.0), math.log(4.0)),
    (logaddexp, math.log(3.0), math.log(1.0), math.log(4.0)),
]


@pytest.mark.parametrize(("function", "value", "expected"), ONE)
def test_a_function_of_one_gives_what_it_is_given(
    function: Callable[..., Any], value: float, expected: float
) -> None:
    alone, row = function(value), function(np.array([value, value]))
    assert isinstance(alone, float)
    assert alone == pytest.approx(expected, rel=1e-15)
    assert isinstance(row, np.ndarray)
    assert row == pytest.approx([expected, expected], rel=1e-15)


@pytest.mark.parametrize("function", [exp, log, log1p, sqrt])
def test_a_float_and_a_row_of_many_say_the_same_to_the_last_bit(
    function: Callable[..., Any],
) -> None:
    values = np.random.default_rng(0).uniform(1e-3, 30.0, 2_000)
    assert [function(value) for value in values.tolist()] == function(values).tolist()


@pytest.mark.parametrize(("function", "first", "second", "expected"), TWO)
def test_a_function_of_two_gives_an_array_as_soon_as_one_is(
    function: Callable[..., Any], first: float, second: float, expected: float
) -> None:
    alone = function(first, second)
    assert isinstance(alone, float)
    assert alone == pytest.approx(expected, rel=1e-15)
    for one, other in (
        (np.full(2, first), second),
        (first, np.full(2, second)),
        (np.full(2, first), np.full(2, second)),
    ):
        row = function(one, other)
        assert isinstance(row, np.ndarray)
        assert row == pytest.approx([expected, expected], rel=1e-15)


def test_a_column_broadcasts_against_a_row() -> None:
    column, row = np.array([[1.0], [3.0]]), np.array([2.0, 0.0])
    assert maximum(column, row).tolist() == [[2.0, 1.0], [3.0, 3.0]]


def test_a_condition_chooses_for_one_case_and_row_by_row() -> None:
    assert where(True, 1.0, 2.0) == 1.0
    assert where(False, 1.0, 2.0) == 2.0
    rows = np.array([True, False])
    assert where(rows, 1.0, np.array([5.0, 6.0])).tolist() == [1.0, 6.0]
    assert where(False, 1.0, np.array([5.0, 6.0])).tolist() == [5.0, 6.0]


def test_a_condition_on_numpys_own_numbers_chooses_a_float() -> None:
    chosen = where(np.float64(1.0) > 2.0, 1.0, 2.0)  # an np.bool_, no array
    assert isinstance(chosen, float)
    assert chosen == 2.0


def test_the_logarithm_of_nothing_is_minus_infinity() -> None:
    assert log(0.0) == -math.inf
    assert log(np.array([0.0, 1.0])).tolist() == [-math.inf, 0.0]


@pytest.mark.parametrize("nothing", [-math.inf, np.array([-math.inf])])
def test_nothing_added_to_nothing_is_nothing(nothing: Any) -> None:
    assert logaddexp(nothing, nothing) == -math.inf
    assert logaddexp(nothing, 2.0) == 2.0
    assert exp(nothing) == 0.0


@given(first=st.floats(-1e6, 1e6), second=st.floats(-1e6, 1e6))
def test_added_logarithms_are_the_same_alone_and_in_an_array(first: float, second: float) -> None:
    row = logaddexp(np.array([first]), np.array([second]))
    assert logaddexp(first, second) == pytest.approx(row[0], rel=1e-15, abs=1e-15)


def test_the_expected_maximum_of_two_standard_normals_is_known() -> None:
    # Exactly 1/√π for two draws; Blom's approximation is within 5 %.
    assert expected_maximum(1) == 0.0
    assert expected_maximum(2) == pytest.approx(1 / math.sqrt(math.pi), rel=0.05)


def test_the_expected_maximum_of_every_row_is_that_of_its_count() -> None:
    counts = np.array([8, 1, 1024, 8])
    expected = [expected_maximum(count) for count in (8, 1, 1024, 8)]
    assert expected_maximum(counts).tolist() == expected
    assert expected_maximum(counts.astype(float)).tolist() == expected
    assert expected_maximum(np.zeros(0, dtype=int)).tolist() == []


ANY = st.floats(allow_nan=True, allow_infinity=True)


def alike(alone: float, row: Any) -> None:
    assert isinstance(alone, float)
    assert row.tolist() == pytest.approx([alone], rel=1e-12, abs=1e-300, nan_ok=True)


@given(value=ANY)
@pytest.mark.parametrize("function", [function for function, _, _ in ONE])
def test_a_function_of_one_says_the_same_of_any_float_and_of_an_array(
    function: Callable[..., Any], value: float
) -> None:
    alike(function(value), function(np.array([value])))


@given(first=ANY, second=ANY)
@pytest.mark.parametrize("function", [maximum, minimum, logaddexp])
def test_a_function_of_two_says_the_same_of_any_floats_and_of_arrays(
    function: Callable[..., Any], first: float, second: float
) -> None:
    with np.errstate(all="ignore"):
        alike(function(first, second), function(np.array([first]), np.array([second])))


@pytest.mark.parametrize("function", [maximum, minimum, logaddexp])
@pytest.mark.parametrize("other", [1.0, math.inf, -math.inf, math.nan])
def test_what_is_no_number_stays_so(function: Callable[..., Any], other: float) -> None:
    assert math.isnan(function(math.nan, other))
    assert math.isnan(function(other, math.nan))


@given(count=st.floats(0.0, 1e6))
def test_counts_are_whole_alone_as_in_an_array(count: float) -> None:
    alike(expected_maximum(count), expected_maximum(np.array([count])))
