"""Lay out what was observed, and what it teaches of a model, as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from estimator.calibrate.lessons import Lesson
from estimator.calibrate.review import Review
from estimator.units import format_ratio, format_seconds


def review_report(found: Review) -> RenderableType:
    """The jobs of a store, what has drifted, and what no fit uses."""
    table = _table("observed steps", "job", "machines")
    for name in ("observed", "allocations", "since", "until", "fits within", "network"):
        table.add_column(name, justify="right")
    for job in found.jobs:
        table.add_row(
            job.workload,
            job.machines,
            str(job.observations),
            str(job.allocations),
            f"{job.first:%Y-%m-%d}",
            f"{job.last:%Y-%m-%d}",
            format_ratio(job.error_ratio),
            "-" if job.sync_share is None else format_ratio(job.sync_share),
        )
    lines = [str(drift) for drift in found.drifts] or ["nothing has drifted"]
    lines += [
        f"not used: {one.workload} on {one.allocation}, {format_seconds(one.step_time_s)}: {why}"
        for one, why in found.doubtful
    ]
    return Group(table, "", *lines)


def lessons_report(workload: str, lessons: Sequence[Lesson]) -> RenderableType:
    """Every observed step of a model beside the engine alone and beside the calibrated answer."""
    table = _table(f"{workload}: observed and predicted steps", "allocation")
    for name in ("batch", "seen", "observed", "engine", "calibrated", "compute", "network"):
        table.add_column(name, justify="right")
    for lesson in lessons:
        observed_s = lesson.observed_s
        table.add_row(
            lesson.allocation,
            str(lesson.batch_per_gpu),
            str(lesson.observations),
            format_seconds(observed_s),
            _beside(lesson.engine_s, observed_s),
            _beside(lesson.calibrated_s, observed_s),
            f"× {lesson.compute_ratio:.2f}",
            f"× {lesson.communication_ratio:.2f}",
        )
    return table


def _beside(predicted_s: float, observed_s: float) -> str:
    return f"{format_seconds(predicted_s)} ({100 * (predicted_s / observed_s - 1):+.0f} %)"


def _table(title: str, *words: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for name in words:
        table.add_column(name)
    return table
