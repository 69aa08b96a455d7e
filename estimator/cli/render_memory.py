"""Lay out where the memory of a step goes, and what would make it fit, as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from estimator.cli.render import facts, grid, stacked
from estimator.report.facts import FITS_WORDS
from estimator.units import format_bytes, format_ratio, format_seconds

if TYPE_CHECKING:
    from estimator.advise.fitting import Remedy
    from estimator.advise.memory import MemoryReport
    from estimator.advise.swap_search import Planned

_MOST_ROWS = 12


def memory_report(report: MemoryReport, *more: RenderableType | None) -> Group:
    """The peak by kind, and what is alive at it by module and by tensor."""
    answer, curve = report.answer, report.curve
    batch = f", {answer.batch_per_gpu} per device" if answer.batch_per_gpu is not None else ""
    heading = f"{answer.model} on {answer.allocation}, {answer.strategy}{batch}"
    place = report.peak_op + (f" of {report.peak_module}" if report.peak_module else "")
    held = f"{format_bytes(curve.peak_bytes)} of {format_bytes(report.device_bytes)}"
    rows = [("peak memory", f"{held} ({FITS_WORDS[answer.fits]})"), ("reached in", place)]
    return stacked(
        Group(Text(heading, style="bold"), facts(rows)),
        _kinds(report),
        _modules(report),
        _tensors(report),
        *more,
    )


def _kinds(report: MemoryReport) -> Table:
    curve = report.curve
    table = grid("By kind", "kind", "at the peak", "of it", "at most", numbers=3)
    for kind, size in sorted(curve.at(curve.peak_at).items(), key=lambda item: -item[1]):
        most = int(curve.levels[kind].max())
        if most:
            share = format_ratio(size / curve.peak_bytes)
            table.add_row(kind, format_bytes(size), share, format_bytes(most))
    return table


def _modules(report: MemoryReport) -> Table:
    table = grid("By module", "parameters, gradients and activations of", "bytes", numbers=1)
    rows = list(report.modules.items())
    for path, size in rows[:_MOST_ROWS]:
        table.add_row(path, format_bytes(size))
    if len(rows) > _MOST_ROWS:
        rest = sum(size for _, size in rows[_MOST_ROWS:])
        table.add_row(f"{len(rows) - _MOST_ROWS} others", format_bytes(rest))
    return table


def _tensors(report: MemoryReport) -> Table:
    ops = len(report.curve.total) - 1
    table = grid("Largest of them", "tensor", "of", "made by op", "held until", "bytes", numbers=3)
    for tensor in report.tensors[:_MOST_ROWS]:
        born = str(tensor.born) if tensor.born >= 0 else "before"
        dies = str(tensor.dies) if tensor.dies < ops else "the end"
        what = tensor.op or tensor.kind
        table.add_row(what, tensor.module, born, dies, format_bytes(tensor.size_bytes))
    return table


def remedies_table(remedies: Sequence[Remedy]) -> Table | None:
    """What would make it fit, cheapest first; None where nothing is listed."""
    if not remedies:
        return None
    table = grid("What would make it fit", "change", "peak", "step", "device time", numbers=3)
    for remedy in remedies:
        table.add_row(
            remedy.change,
            format_bytes(remedy.peak_bytes),
            format_seconds(remedy.step_time_s),
            f"{remedy.cost_ratio:+.1%}".replace("%", " %"),
        )
    return table


def plans_table(plans: Sequence[Planned]) -> Table | None:
    """Peak against time under plans of swapping and recomputing; None where none were asked for."""
    if not plans:
        return None
    columns = ("peak", "lower by", "step", "longer by", "swapped", "computed again")
    table = grid("Plans that lower the peak", *columns, numbers=len(columns))
    for each in plans:
        table.add_row(
            format_bytes(each.played.peak_bytes),
            format_ratio(each.played.saved_ratio),
            format_seconds(each.played.step_s),
            format_ratio(each.played.overhead_ratio),
            str(len(each.plan.swaps)),
            str(len(each.plan.recomputes)),
        )
    return table
