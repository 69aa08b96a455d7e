"""Lay out observed jobs and fitted steps as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType

from estimator.calibrate.calibrator import FittedStep
from estimator.calibrate.review import Review
from estimator.cli.render.answers import grid
from estimator.units import format_ratio, format_seconds


def review_report(found: Review) -> RenderableType:
    """The jobs of a store, drift, populations, outliers, and what fits do not use."""
    figures = ("observed", "allocations", "since", "until", "median error", "sync share")
    table = grid("observed steps", "job", "machines", *figures, numbers=len(figures))
    for job in found.jobs:
        table.add_row(
            job.workload
            + (" (by name)" if job.fingerprint is None else f" #{job.fingerprint[:6]}"),
            _placed(job.machines, job.layout),
            str(job.observations),
            str(job.allocations),
            f"{job.first:%Y-%m-%d}",
            f"{job.last:%Y-%m-%d}",
            format_ratio(job.error_ratio),
            "-" if job.sync_share is None else format_ratio(job.sync_share),
        )
    lines = [str(drift) for drift in found.drifts] or ["no drift"]
    lines += [str(populations) for populations in found.populations]
    alike = Counter(
        (f"{one.workload} on {one.allocation} with batch {one.batch_per_gpu}", why)
        for one, why in found.doubted
    )
    lines += [
        f"doubted, counts little: {what}{f', {times} observations' if times > 1 else ''}: {why}"
        for (what, why), times in alike.items()
    ]
    lines += [
        f"outlier, not used: {one.workload} on {one.allocation}: {why}"
        for one, why in found.outliers
    ]
    return Group(table, "", *lines)


def fitted_steps_report(workload: str, steps: Sequence[FittedStep]) -> RenderableType:
    """Observed steps of a model beside the engine's predictions and the calibrated ones."""
    figures = ("batch", "seen", "observed", "engine", "calibrated", "compute", "network")
    title = f"{workload}: observed and predicted steps"
    table = grid(title, "allocation", *figures, numbers=len(figures))
    for step in steps:
        observed_s = step.observed_s
        table.add_row(
            _placed(step.allocation, step.layout),
            str(step.batch_per_gpu),
            str(step.observations),
            format_seconds(observed_s),
            _beside(step.engine_s, observed_s),
            _beside(step.calibrated_s, observed_s),
            f"× {step.compute_ratio:.2f}",
            f"× {step.communication_ratio:.2f}",
        )
    return table


def _placed(where: str, layout: str | None) -> str:
    return where if layout is None else f"{where}, {layout}"


def _beside(predicted_s: float, observed_s: float) -> str:
    return f"{format_seconds(predicted_s)} ({100 * (predicted_s / observed_s - 1):+.0f} %)"
