"""Validate predictions made beforehand against real training runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from estimator.estimates.estimate import Estimate


def noise_of(seconds: Sequence[float]) -> float:
    """Relative noise of repeated measurements: half the 10–90 % range over the median.

    >>> round(noise_of([1.0, 1.1, 1.2, 0.9, 1.0]), 3)
    0.11
    """
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return (tenths[-1] - tenths[0]) / 2 / statistics.median(seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """One prediction with the step times, one a fresh run, that were measured after it."""

    predicted: Estimate
    runs_s: tuple[float, ...]

    @property
    def measured_s(self) -> float:
        return statistics.median(self.runs_s)

    @property
    def noise_ratio(self) -> float:
        return noise_of(self.runs_s)

    @property
    def error_ratio(self) -> float:
        """How far the prediction is above (positive) or below the measurement, relative to it."""
        return self.predicted.step_time_s / self.measured_s - 1

    @property
    def is_within_interval(self) -> bool:
        return self.predicted.low_s <= self.measured_s <= self.predicted.high_s

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in base units."""
        return {
            "predicted": self.predicted.to_dict(),
            "runs_s": list(self.runs_s),
            "measured_s": self.measured_s,
            "noise_ratio": self.noise_ratio,
            "error_ratio": self.error_ratio,
            "is_within_interval": self.is_within_interval,
        }


def validate(
    predictions: Sequence[Estimate],
    train: Callable[[Estimate], float],
    *,
    repeats: int,
    report: Callable[[int, Estimate, float], None],
) -> tuple[Validation, ...]:
    """Call `train` for every prediction, `repeats` times over, and pair the step times with them.

    Repeats are interleaved, so that drift of the machine affects every prediction equally.
    `report` is told each run's number, its prediction and its step time.
    """
    runs_s: list[list[float]] = [[] for _ in predictions]
    for repeat in range(repeats):
        for index, predicted in enumerate(predictions):
            step_s = train(predicted)
            runs_s[index].append(step_s)
            report(repeat * len(predictions) + index + 1, predicted, step_s)
    return tuple(
        Validation(predicted=predicted, runs_s=tuple(seconds))
        for predicted, seconds in zip(predictions, runs_s, strict=True)
    )
