"""Fit step times over the batch size, and let calls of a graph stand for shares of such a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from estimator.graph.cost_registry import cost_of
from estimator.graph.ops import OpCost
from estimator.machines.profile import Device
from estimator.tensors import OpCall, TensorSpec
from estimator.workload.precision import peak_dtype

STEP_PART = "summary.step_part"
# Pollux's single-T4 step times of BERT, ResNet-18 and DeepSpeech2 (petuum/adaptdl, OSDI 2021
# artifact): from one batch size to the next the median of d log seconds / d log batch is 0.79.
_FIXED_RATIO = 0.2
# There, the median error for each e-fold of the batch beyond those fitted to (mean of the three
# models): of that rule from one step time 0.15, of the line through two 0.12.
_ERROR_PER_E_FOLD_OF_ONE, _ERROR_PER_E_FOLD = 0.15, 0.12
# Batches between two timed ones are off by 1 to 6 % there.
_LEAST_ERROR = 0.03


def known_peak(device: Device, precision: str) -> float | None:
    """A device's dense peak in a model's precision, in fp32 where it computes so instead."""
    peaks = device.peak_flops_per_s
    return peaks.get(peak_dtype(precision)) or peaks.get("float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """Seconds of a whole step on one device: fixed_s + samples · per_sample_s, as fitted.

    `relative_error` is the median of what the line misses of the step times; those were at
    `low_batch` to `high_batch` samples, on a device with the peak `peak_flops_per_s` in the model's
    precision (None: not known).
    """

    fixed_s: float
    per_sample_s: float
    relative_error: float
    low_batch: int
    high_batch: int
    peak_flops_per_s: float | None

    def __post_init__(self) -> None:
        # Nobody waits for longer steps; an interval is e to the power of its error.
        most = {"fixed_s": 1e9, "per_sample_s": 1e9, "relative_error": 100.0}
        for name, value in most.items():
            if not 0 <= getattr(self, name) <= value:
                raise ValueError(f"{name} of a step line is no number from 0 to {value:g}")
        if self.peak_flops_per_s is not None and not 0 < self.peak_flops_per_s <= 1e30:
            raise ValueError(f"a device with a peak of {self.peak_flops_per_s!r} FLOP/s is none")
        if not 1 <= self.low_batch <= self.high_batch:
            raise ValueError(f"step times are from {self.low_batch} to {self.high_batch} samples")

    def step_s(self, batch: int) -> float:
        """Seconds of a step of `batch` samples."""
        return self.fixed_s + batch * self.per_sample_s

    def error_at(self, batch: int) -> float:
        """Median relative error at a batch size; it grows beyond the ones that were timed."""
        one = self.low_batch == self.high_batch
        per_e_fold = _ERROR_PER_E_FOLD_OF_ONE if one else _ERROR_PER_E_FOLD
        beyond = max(math.log(self.low_batch / batch), math.log(batch / self.high_batch), 0.0)
        return max(self.relative_error, _LEAST_ERROR) + per_e_fold * beyond


def fit_step_line(
    step_times: Sequence[tuple[int, float]], *, peak_flops_per_s: float | None = None
) -> StepLine:
    """The line with coefficients ≥ 0 that errs least in relative terms (Lawson and Hanson 1974).

    From times at a single batch size, a fifth of the step is taken not to depend on it.

    >>> line = fit_step_line([(8, 0.3), (16, 0.5)])
    >>> round(line.fixed_s, 6), round(line.per_sample_s, 6)
    (0.1, 0.025)
    """
    import numpy as np
    from scipy.optimize import nnls

    batches = np.array([batch for batch, _ in step_times], dtype=float)
    seconds = np.array([time_s for _, time_s in step_times])
    low, high = int(batches.min()), int(batches.max())
    rows = np.column_stack([1 / seconds, batches / seconds])
    if low == high:
        shape = np.array([_FIXED_RATIO, (1 - _FIXED_RATIO) / low])
        fitted = shape * float(np.median(seconds))
    else:
        fitted = nnls(rows, np.ones(len(seconds)))[0]
    return StepLine(
        fixed_s=float(fitted[0]),
        per_sample_s=float(fitted[1]),
        relative_error=float(np.median(np.abs(rows @ fitted - 1))),
        low_batch=low,
        high_batch=high,
        peak_flops_per_s=peak_flops_per_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """What one call of a graph made from step times stands for: a share of the step's compute."""

    share_ratio: float
    batch: int
    line: StepLine
    flops_per_sample: float | None

    def __post_init__(self) -> None:
        if not (0 <= self.share_ratio <= 1 and self.batch >= 1):
            raise ValueError(f"{self.share_ratio!r} of a step of {self.batch!r} samples is no part")

    def call(self, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> OpCall:
        """The part as a call that reads and writes these tensors."""
        line = self.line
        numbers = (self.share_ratio, self.batch, self.flops_per_sample, line.fixed_s)
        more = (line.per_sample_s, line.relative_error, line.low_batch, line.high_batch)
        return OpCall(STEP_PART, (*inputs, *numbers, *more, line.peak_flops_per_s), outputs=outputs)

    @classmethod
    def of(cls, call: OpCall) -> StepPart:
        """The part that a call stands for; raises ValueError or TypeError for any other call."""
        share, batch, flops, fixed, per_sample, error, low, high, peak = call.arguments[
            len(call.inputs) :
        ]
        line = StepLine(
            fixed_s=float(fixed),
            per_sample_s=float(per_sample),
            relative_error=float(error),
            low_batch=int(low),
            high_batch=int(high),
            peak_flops_per_s=None if peak is None else float(peak),
        )
        return cls(
            share_ratio=float(share),
            batch=int(batch),
            line=line,
            flops_per_sample=None if flops is None else float(flops),
        )


@cost_of(STEP_PART, family="step")
def _step_part(call: OpCall) -> OpCost:
    part = StepPart.of(call)
    # A whole graph whose flops sum to zero does not know them: it has no MFU.
    return OpCost(flops=part.share_ratio * part.batch * (part.flops_per_sample or 0.0))
