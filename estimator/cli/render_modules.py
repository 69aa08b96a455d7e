"""Lay out what each module takes of a step as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from estimator.cli.render import grid
from estimator.units import format_bytes, format_count, format_ratio, format_seconds

if TYPE_CHECKING:
    from estimator.advise.modules import ModuleCost

_MOST_ROWS = 40


def modules_table(rows: Sequence[ModuleCost]) -> Table:
    """One row a module, the longest first; small ones together, then the update."""
    columns = "module", "time", "share", "FLOPs", "memory at the peak"
    table = grid(
        "by module, on one rank (memory without the optimizer's state)", *columns, numbers=4
    )
    whole_s = sum(row.time_s for row in rows)
    *modules, update = rows
    for row in modules[:_MOST_ROWS]:
        _add(table, row.module, [row], whole_s)
    if rest := modules[_MOST_ROWS:]:
        _add(table, f"{len(rest)} others", rest, whole_s)
    _add(table, update.module, [update], whole_s)
    return table


def _add(table: Table, name: str, rows: Sequence[ModuleCost], whole_s: float) -> None:
    time_s, flops = sum(row.time_s for row in rows), sum(row.flops for row in rows)
    memory_bytes = sum(row.memory_bytes for row in rows)
    table.add_row(
        name,
        format_seconds(time_s),
        format_ratio(time_s / whole_s),
        f"{format_count(flops)}FLOP" if flops else "",
        format_bytes(memory_bytes) if memory_bytes else "",
    )
