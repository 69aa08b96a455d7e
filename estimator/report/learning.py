"""Describe observed jobs and fitted steps as sections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from estimator.report.sections import Section, Table
from estimator.units import format_ratio, format_seconds

if TYPE_CHECKING:
    from estimator.calibrate.calibrator import FittedStep
    from estimator.calibrate.review import Review


def review_section(review: Review) -> Section:
    """The jobs of a store, drift, populations, outliers, and what fits do not use."""
    rows = [
        (
            f"{job.workload} {f'#{job.fingerprint[:6]}' if job.fingerprint else '(by name)'}",
            _placed(job.machines, job.layout),
            *(str(job.observations), str(job.allocations)),
            *(f"{job.first:%Y-%m-%d}", f"{job.last:%Y-%m-%d}", format_ratio(job.error_ratio)),
            "-" if job.sync_share is None else format_ratio(job.sync_share),
        )
        for job in review.jobs
    ]
    figures = ("observed", "allocations", "since", "until", "median error", "sync share")
    lines = [str(drift) for drift in review.drifts] or ["no drift"]
    lines += [str(populations) for populations in review.populations]
    alike = Counter(
        (f"{one.workload} on {one.allocation} with batch {one.batch_per_gpu}", why)
        for one, why in review.doubted
    )
    lines += [
        f"doubted, counts little: {what}{f', {times} observations' if times > 1 else ''}: {why}"
        for (what, why), times in alike.items()
    ]
    lines += [
        f"outlier, not used: {one.workload} on {one.allocation}: {why}"
        for one, why in review.outliers
    ]
    table = Table(("job", "machines", *figures), rows, numbers=len(figures))
    return Section("observed steps", table=table, sentences=lines)


def fitted_steps_section(workload: str, steps: Sequence[FittedStep]) -> Section:
    """Observed steps of a model beside the engine's predictions and the calibrated ones."""
    rows = [
        (
            *(_placed(step.allocation, step.layout), str(step.batch_per_gpu)),
            *(str(step.observations), format_seconds(step.observed_s)),
            _beside(step.engine_s, step.observed_s),
            _beside(step.calibrated_s, step.observed_s),
            *(f"× {step.compute_ratio:.2f}", f"× {step.communication_ratio:.2f}"),
        )
        for step in steps
    ]
    figures = ("batch", "seen", "observed", "engine", "calibrated", "compute", "network")
    table = Table(("allocation", *figures), rows, numbers=len(figures))
    return Section(f"{workload}: observed and predicted steps", table=table, name="calibration")


def _placed(where: str, layout: str | None) -> str:
    return where if layout is None else f"{where}, {layout}"


def _beside(predicted_s: float, observed_s: float) -> str:
    return f"{format_seconds(predicted_s)} ({100 * (predicted_s / observed_s - 1):+.0f} %)"
