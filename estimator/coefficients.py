"""Multipliers that calibration learns and every estimate applies; all 1 until learnt."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Protocol

from estimator.allocation import Allocation


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """Factors on the physical model's parts, and the relative error that remains after them.

    `relative_error` is one standard deviation of log(measured / predicted); None leaves the
    interval to the profile's own errors.
    """

    compute_ratio: float = 1.0
    update_ratio: float = 1.0
    communication_ratio: float = 1.0
    relative_error: float | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"Coefficients.{item.name} must be positive, found {value}")


UNCALIBRATED = Coefficients()


class Calibration(Protocol):
    """What `estimate` needs of a calibrator."""

    def coefficients_for(self, workload: str, allocation: Allocation) -> Coefficients:
        """The factors for a workload, by its graph's name, on an allocation."""
        ...
