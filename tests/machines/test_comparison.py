"""Profiles are compared number by number, where both have the number."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from estimator.cli.console import rendered
from estimator.machines.catalogue import load_profile
from estimator.machines.comparison import (
    compare_profiles,
    compare_several,
    disturbed_groups,
    median_difference_ratio,
    only_in,
)
from estimator.machines.profile import Interference, LinkKind, MachineProfile, Provenance
from estimator.report.profiles import comparison_section


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
    matmul, addition = small_profile.kernels
    slow = replace(matmul.points[1], warm_s=3 * matmul.points[1].warm_s)
    other = replace(small_profile, kernels=(replace(matmul, points=(slow,)), addition))
    rows = [row for row in compare_profiles(small_profile, other) if "aten.mm" in row.group]
    assert [row.ratio for row in rows] == [pytest.approx(3.0)]


def test_what_only_one_profile_has_is_told_apart(small_profile: MachineProfile) -> None:
    other = replace(small_profile, host=None, updates=())
    rows = compare_profiles(small_profile, other)
    assert {row.group for row in rows}.isdisjoint({"host", "update"})
    assert {each.group for each in only_in(small_profile, other)} == {"host", "update"}
    assert only_in(other, small_profile) == ()


def test_unlike_kinds_of_links_compare_by_what_they_join(small_profile: MachineProfile) -> None:
    def joined_by(kind: LinkKind) -> MachineProfile:
        return replace(small_profile, links=(replace(small_profile.links[0], kind=kind),))

    rows = compare_profiles(joined_by("nvlink"), joined_by("pcie"))
    names = [row.name for row in rows if row.group == "link"]
    assert names == ["between devices, latency", "between devices, bandwidth"]


def test_a_comparison_shows_what_either_has_and_estimates_assume(
    small_profile: MachineProfile,
) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(rendered([comparison_section(small_profile, load_profile("h100-sxm"))]))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    # Its memory bandwidth is measured by neither; the datasheet tells one and a typical host cost.
    told = {line.split("  ")[1].strip(): line for line in lines if line.startswith("  ")}
    assert "–" in told["between nodes, bandwidth"]
    assert "400 GB/s" in told["between nodes, bandwidth"]
    assert "4.00 µs" in told["forward op"]
    assert any("host and updates of 'h100-sxm' are usual ones" in line for line in lines)


def test_links_for_unlike_numbers_of_devices_have_names_of_their_own() -> None:
    rows = only_in(load_profile("dgx-1"), load_profile("titan-rtx"))
    names = [row.name for row in rows if row.group == "link"]
    assert len(set(names)) == len(names)
    assert "between devices, rings of up to 2, bandwidth" in names


def slower(profile: MachineProfile, ratio: float) -> MachineProfile:
    """The machine with kernels that take so many times as long."""
    kernels = tuple(
        replace(each, points=tuple(replace(p, warm_s=ratio * p.warm_s) for p in each.points))
        for each in profile.kernels
    )
    return replace(profile, kernels=kernels)


def test_the_odd_one_of_several_nodes_is_found(small_profile: MachineProfile) -> None:
    ratios = {"a1": 1.0, "a2": 1.01, "a3": 1.18, "a4": 0.99}
    rows = compare_several({name: slower(small_profile, ratios[name]) for name in ratios})
    kernels = {row.machine: row.ratio for row in rows if row.group == "kernels"}
    # Of four machines the usual one is halfway between the two in the middle.
    assert kernels == {name: pytest.approx(ratios[name] / 1.005) for name in ratios}
    assert [(row.machine, row.group) for row in rows if row.is_odd] == [("a3", "kernels")]


def test_of_nodes_that_all_differ_none_is_odd(small_profile: MachineProfile) -> None:
    ratios = {"a1": 0.8, "a2": 0.9, "a3": 1.0, "a4": 1.1, "a5": 1.2}
    rows = compare_several({name: slower(small_profile, ratios[name]) for name in ratios})
    assert not any(row.is_odd for row in rows)


def test_a_rate_that_is_half_takes_twice_as_long(small_profile: MachineProfile) -> None:
    link = small_profile.links[0]
    halved = replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / 2, latency_s=2e-6)
    odd = replace(small_profile, links=(halved,))
    rows = compare_several({"a": small_profile, "b": odd, "c": small_profile})
    assert {(r.machine, r.ratio) for r in rows if r.group == "link"} == {
        ("a", 1.0),
        ("b", 2.0),
        ("c", 1.0),
    }


BUSY = Interference(others_ratio=0.5)


def test_a_comparison_says_which_profile_was_disturbed_and_what_that_touches(
    small_profile: MachineProfile,
) -> None:
    told = replace(small_profile.links[0], provenance=Provenance(source="datasheet", at="2026"))
    one, other = replace(small_profile, name="a", interference=BUSY, links=(told,)), small_profile
    console = Console(width=1000, record=True, file=io.StringIO())
    console.print(rendered([comparison_section(one, replace(other, name="b"))]))
    lines = console.export_text().splitlines()
    (said,) = [line for line in lines if "other programs used 50 % of the cores" in line]
    # What shares a core for half of the time takes twice as long.
    assert "'a' was measured while" in said
    assert "may be off by 2.00 times" in said
    # A rate of a datasheet and the size of the memory were not measured then.
    groups = ("device", "host", "memory", "collective", "update", "kernels")
    assert disturbed_groups(one) == groups
    assert ", ".join(groups) in said


def test_profiles_that_were_measured_in_quiet_are_not_spoken_of(
    small_profile: MachineProfile,
) -> None:
    assert disturbed_groups(small_profile) == ()
    assert disturbed_groups(replace(small_profile, interference=Interference())) == ()


def test_the_exit_code_of_a_comparison_tells_whether_a_node_is_odd(
    small_profile: MachineProfile, tmp_path: Path, command: Callable[..., Any]
) -> None:
    paths = [str(tmp_path / f"a{number}.json") for number in range(4)]
    for path in paths[:3]:
        small_profile.save(Path(path))
    busy = replace(slower(small_profile, 2.0), interference=BUSY)
    busy.save(Path(paths[3]))
    even = command("machines", "compare", *paths[:3])
    assert (even.code, "none is odd" in even.out) == (0, True)
    odd = command("machines", "compare", *paths)
    assert (odd.code, "is odd: kernels" in odd.out) == (1, True)
    assert "other programs used 50 % of the cores" in " ".join(odd.out.split())
    as_json = command("machines", "compare", *paths, "--json")
    assert as_json.code == 1
    disturbed = {row["machine"] for row in json.loads(as_json.out) if row["is_disturbed"]}
    assert disturbed == {paths[3]}
    two = command("machines", "compare", paths[0], paths[3], "--json")
    assert two.code == 0, "of two none is the odd one"
    (told,) = json.loads(two.out)["disturbed"]
    assert told["relative_error"] == pytest.approx(math.log(2))
    assert "kernels" in told["groups"]
