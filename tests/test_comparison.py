"""Profiles are compared number by number, where both have the number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator.comparison import compare_profiles, median_difference_ratio
from estimator.profile import MachineProfile


def test_equal_profiles_differ_by_nothing(small_profile: MachineProfile) -> None:
    rows = compare_profiles(small_profile, small_profile)
    assert {row.ratio for row in rows} == {1.0}
    assert median_difference_ratio(rows) == 0.0


def test_a_ratio_is_the_second_over_the_first(small_profile: MachineProfile) -> None:
    link = replace(small_profile.links[0], bandwidth_bytes_per_s=2.5e9)
    rows = compare_profiles(small_profile, replace(small_profile, links=(link,)))
    changed = [row for row in rows if row.ratio != 1.0]
    assert [(row.group, row.ratio) for row in changed] == [("link", 0.25)]


def test_kernels_are_compared_call_by_call(small_profile: MachineProfile) -> None:
    product, addition = small_profile.kernels
    slow = replace(product.points[1], warm_s=3 * product.points[1].warm_s)
    other = replace(small_profile, kernels=(replace(product, points=(slow,)), addition))
    rows = [row for row in compare_profiles(small_profile, other) if "aten.mm" in row.group]
    assert [row.ratio for row in rows] == [pytest.approx(3.0)]


def test_what_only_one_profile_has_is_left_out(small_profile: MachineProfile) -> None:
    rows = compare_profiles(small_profile, replace(small_profile, host=None, updates=()))
    assert {row.group for row in rows}.isdisjoint({"host", "update"})
