"""Lay out what replays were worth, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from estimator.cli.render import grid
from estimator.units import format_ratio

if TYPE_CHECKING:
    from estimator.cluster.metrics import Outcome


def replay_report(cluster: str, outcomes: Mapping[str, Outcome]) -> Group:
    """One row a policy; times in hours, × against the first policy."""
    first = next(iter(outcomes.values()))
    table = grid(
        f"{first.jobs} jobs on {cluster}, times in hours",
        *("policy", "JCT", "×", "median", "90 %", "99 %", "makespan", "×"),
        *("used", "queue", "ρ", "restarts"),
        numbers=11,
    )
    for name, each in outcomes.items():
        table.add_row(
            name,
            _hours(each.average_jct_s),
            f"{first.average_jct_s / each.average_jct_s:.2f}",
            *map(_hours, (each.median_jct_s, each.p90_jct_s, each.p99_jct_s, each.makespan_s)),
            f"{first.makespan_s / each.makespan_s:.2f}",
            format_ratio(each.utilization_ratio),
            _hours(each.average_queue_s),
            f"{each.average_fairness:.2f} ≤ {each.worst_unfairness:.1f}",
            f"{each.restarts_per_job:.1f}",
        )
    notes = (
        "× is against the first policy; ρ is finish-time fairness, mean and worst: completion time "
        "over that alone on an equal share of the cluster"
    )
    return Group(table, Text(notes))


def _hours(seconds: float) -> str:
    return f"{max(seconds, 0.0) / 3600:.2f}"
