"""Lay out two machine profiles side by side for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from estimator.cli.render import grid
from estimator.machines.comparison import (
    Compared,
    GroupRatio,
    Quantity,
    Unit,
    compare_profiles,
    disturbed_groups,
    median_difference_ratio,
    only_in,
)
from estimator.machines.typical import with_typical_costs
from estimator.units import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_ratio,
    format_seconds,
)

if TYPE_CHECKING:
    from estimator.machines.profile import MachineProfile


def comparison_report(first: MachineProfile, second: MachineProfile) -> Group:
    """Two profiles side by side, group by group; a ratio is the second's number over the first's.

    Where a machine is known by its datasheet only, its host and updates are what estimates take.
    """
    one, other = with_typical_costs(first), with_typical_costs(second)
    common = compare_profiles(one, other)
    table = grid("", "quantity", first.name, second.name, "ratio", numbers=3)
    rows = [*_common_rows(common), *_lone_rows(only_in(one, other), 0)]
    rows += _lone_rows(only_in(other, one), 1)
    for group in dict.fromkeys(group for group, _ in rows):
        table.add_row(Text(group, style="bold"))
        for its, cells in rows:
            if its == group:
                table.add_row(*cells)
        table.add_section()
    remarks = [
        f"host and updates of '{profile.name}' are usual ones: none of its own was measured"
        for profile, completed in ((first, one), (second, other))
        if completed is not profile
    ]
    if common:
        difference = format_ratio(median_difference_ratio(common))
        remarks.insert(0, f"{len(common)} numbers in common, median difference {difference}")
    else:
        remarks.insert(0, f"'{first.name}' and '{second.name}' have no number in common")
    remarks += _disturbed({first.name: first, second.name: second})
    return Group(table, *map(Text, remarks))


def several_report(rows: Sequence[GroupRatio], profiles: Mapping[str, MachineProfile]) -> Group:
    """How long each of several machines takes, group by group, and which of them is odd."""
    machines = list(dict.fromkeys(row.machine for row in rows))
    table = grid("times as long as usual", "group", *machines, numbers=len(machines))
    for group in dict.fromkeys(row.group for row in rows):
        found = [row for row in rows if row.group == group]
        name = f"{group}, {found[0].quantities} numbers"
        table.add_row(name, *(_factor(row.ratio) for row in found))
    remarks = [
        f"{row.machine} is odd: {row.group} {_factor(max(row.ratio, 1 / row.ratio))} times as "
        f"{'slow' if row.ratio > 1 else 'fast'} as usual"
        for row in sorted(rows, key=lambda row: -abs(math.log(row.ratio)))
        if row.is_odd
    ]
    if not machines:
        remarks = ["these machines have no number in common"]
    remarks = remarks or ["none is odd: they differ as repeats do"]
    return Group(table, *map(Text, [*remarks, *_disturbed(profiles)]))


def _disturbed(profiles: Mapping[str, MachineProfile]) -> list[str]:
    """Of each machine that was disturbed when it was probed, what that touches and how far."""
    return [
        f"'{name}' was measured while {profile.interference}: its {', '.join(groups)} may be off "
        f"by {_factor(math.exp(profile.interference.relative_error))} times; probe it again"
        for name, profile in profiles.items()
        if profile.interference is not None and (groups := disturbed_groups(profile))
    ]


_Row = tuple[str, tuple[str, ...]]


def _common_rows(rows: Sequence[Compared]) -> list[_Row]:
    """(group, cells) of what both have; the calls of a kernel are drawn together into one ratio."""
    calls: dict[str, list[float]] = {}
    found: list[_Row] = []
    for row in rows:
        if row.group.startswith("kernel "):
            calls.setdefault(row.group.removeprefix("kernel "), []).append(row.ratio)
        else:
            shown = _FORMATS[row.unit]
            cells = (f"  {row.name}", shown(row.first), shown(row.second), _factor(row.ratio))
            found.append((row.group, cells))
    for kernel, ratios in calls.items():
        name = f"  {kernel}, {len(ratios)} calls"
        found.append(("kernels in common", (name, "", "", _factor(geometric_mean(ratios)))))
    return found


def _lone_rows(quantities: Sequence[Quantity], column: int) -> list[_Row]:
    """(group, cells) of what one has alone, in its column; of kernels only how many."""
    kernels = [each.group for each in quantities if each.group.startswith("kernel ")]
    found: list[_Row] = []
    for each in quantities:
        if not each.group.startswith("kernel "):
            found.append((each.group, _beside(each.name, _FORMATS[each.unit](each.value), column)))
    if kernels:
        name = f"calls of {len(set(kernels))} kernels"
        found.append(("kernels of one alone", _beside(name, str(len(kernels)), column)))
    return found


def _beside(name: str, value: str, column: int) -> tuple[str, ...]:
    return (f"  {name}", value, "–", "") if column == 0 else (f"  {name}", "–", value, "")


def _factor(ratio: float) -> str:
    return f"{ratio:.2f}" if 0.1 <= ratio < 100 else f"{ratio:.3g}"


_FORMATS: Mapping[Unit, Callable[[float], str]] = {
    "s": format_seconds,
    "bytes": format_bytes,
    "bytes_per_s": format_bandwidth,
    "flops_per_s": lambda rate: f"{format_count(rate)}FLOP/s",
}
