"""Lay out what was observed, and what it teaches of a model, as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType

from estimator.calibrate.lessons import Lesson
from estimator.calibrate.review import Review
from estimator.cli.render import grid
from estimator.units import format_ratio, format_seconds


def review_report(found: Review) -> RenderableType:
    """The jobs of a store, what has drifted, and what no fit uses."""
    figures = ("observed", "allocations", "since", "until", "fits within", "network")
    table = grid("observed steps", "job", "machines", *figures, numbers=len(figures))
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
    figures = ("batch", "seen", "observed", "engine", "calibrated", "compute", "network")
    title = f"{workload}: observed and predicted steps"
    table = grid(title, "allocation", *figures, numbers=len(figures))
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
