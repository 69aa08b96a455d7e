"""Turn (bytes, seconds) samples into a latency and a bandwidth."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from estimator.errors import ProbeError

_ITERATIONS = 30
# Errors beyond this many typical ones count by their size, not by its square (soft L1).
_TYPICAL_ERRORS = 2.0
_LEAST_TYPICAL_ERROR = 1e-3
# Where times do not rise with size, the slope is this small part of the mean rise instead of zero.
_LEAST_SLOPE_RATIO = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFit:
    """n bytes take latency_s + n / bandwidth_bytes_per_s, give or take `relative_error`.

    `relative_error` is the median of |fitted − measured| / measured over the samples.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    relative_error: float

    def time_s(self, size_bytes: float) -> float:
        """Fitted seconds for `size_bytes` bytes."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


def fit_line(sizes_bytes: Sequence[float], seconds: Sequence[float]) -> LineFit:
    """Fit the line that errs least in relative terms, with a latency that is not negative.

    Errors are |log(fitted / measured)|, so that twice too long weighs as much as half as long.
    Starts from the best of the lines through two sizes (least absolute deviations) and refines it
    by re-weighted least squares with a soft-L1 loss: neither a few wild samples nor the largest
    sizes decide, nor messages so small that a shaper or a cache lets them pass at another rate.
    Raises ProbeError on fewer than two sizes.

    >>> round(fit_line([0, 1000, 2000], [0.001, 0.002, 0.003]).bandwidth_bytes_per_s)
    1000000
    """
    sizes, times = np.asarray(sizes_bytes, dtype=float), np.asarray(seconds, dtype=float)
    if sizes.shape != times.shape or len(set(sizes.tolist())) < 2:
        raise ProbeError(
            f"cannot fit latency and bandwidth to {len(set(sizes.tolist()))} sizes; "
            "measure at least two"
        )
    if not (np.all(np.isfinite(times)) and np.all(times > 0)):
        raise ProbeError("cannot fit times that are not positive; measure again")
    latency, slope = _best_pair(sizes, times)
    error = float(np.median(np.abs(np.log((latency + slope * sizes) / times))))
    scale = _TYPICAL_ERRORS * max(error, _LEAST_TYPICAL_ERROR)
    for _ in range(_ITERATIONS):
        weights = _weights(latency + slope * sizes, times, scale)
        latency, slope = _weighted_line(sizes, times, weights)
    errors = np.abs(latency + slope * sizes - times) / times
    return LineFit(
        latency_s=latency,
        bandwidth_bytes_per_s=1 / slope,
        relative_error=float(np.median(errors)),
    )


def _least_slope(sizes: NDArray[np.float64], times: NDArray[np.float64]) -> float:
    return float(_LEAST_SLOPE_RATIO * np.median(times) / sizes.max())


def _best_pair(sizes: NDArray[np.float64], times: NDArray[np.float64]) -> tuple[float, float]:
    """The line through the medians of two sizes from which all samples deviate least."""
    medians = [(size, float(np.median(times[sizes == size]))) for size in np.unique(sizes)]
    least_slope = _least_slope(sizes, times)
    lines = []
    for (size, time_s), (larger, longer_s) in itertools.combinations(medians, 2):
        slope = max((longer_s - time_s) / (larger - size), least_slope)
        latency = time_s - slope * size
        lines.append((latency, slope) if latency >= 0 else (0.0, longer_s / larger))

    def deviation(line: tuple[float, float]) -> float:
        # A line through the origin takes no time for no bytes: bounded, or its log is infinite.
        fitted = np.maximum(line[0] + line[1] * sizes, 1e-3 * times)
        return float(np.abs(np.log(fitted / times)).sum())

    return min(lines, key=deviation)


def _weights(
    fitted: NDArray[np.float64], times: NDArray[np.float64], scale: float
) -> NDArray[np.float64]:
    """Weights under which least squares on seconds descend the soft-L1 loss of log errors."""
    fitted = np.maximum(fitted, 1e-3 * times)
    errors = np.log(fitted / times)
    # log(f / m) / (f − m), which is 1 / m where both meet.
    near = np.abs(errors) < 1e-6
    ratio = np.where(near, 1 / times, errors / np.where(near, 1.0, fitted - times))
    return np.asarray(ratio / fitted / np.sqrt(1 + (errors / scale) ** 2))


def _weighted_line(
    sizes: NDArray[np.float64], times: NDArray[np.float64], weights: NDArray[np.float64]
) -> tuple[float, float]:
    """Weighted least squares with latency ≥ 0 and slope > 0."""
    total = weights.sum()
    mean_size, mean_time = (weights * sizes).sum() / total, (weights * times).sum() / total
    spread = (weights * (sizes - mean_size) ** 2).sum()
    slope = (weights * (sizes - mean_size) * (times - mean_time)).sum() / spread
    slope = max(float(slope), _least_slope(sizes, times))
    latency = float(mean_time - slope * mean_size)
    if latency < 0:
        latency, slope = 0.0, float((weights * sizes * times).sum() / (weights * sizes**2).sum())
    return latency, slope
