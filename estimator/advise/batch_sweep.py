"""Estimate a model at several batches per device, and mark the largest that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from estimator.errors import (
    AllocationError,
    EstimatorError,
    StrategyError,
    WorkloadError,
    quoted,
)
from estimator.estimates import Estimate
from estimator.units import parse_whole
from estimator.workload.strategy import MOST_BATCH

_SHOWN = (
    *("global_batch", "step_time_s", "low_s", "high_s", "samples_per_s"),
    *("peak_memory_bytes", "fits"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """One allocation at one batch per device: its estimate, or why there is none.

    `is_largest` marks the largest batch of the sweep's range that surely fits.
    """

    allocation: str
    batch: int
    answer: Estimate | None
    refusal: str = ""
    is_largest: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in base units."""
        row: dict[str, Any] = {"allocation": self.allocation, "batch_per_gpu": self.batch}
        row |= {"refusal": self.refusal or None, "is_largest": self.is_largest}
        if self.answer is not None:
            row |= {name: getattr(self.answer, name) for name in _SHOWN}
            row |= self.answer.bottleneck_dict()
        return row


def read_batches(text: str) -> tuple[int, ...]:
    """The batches of ``1..64``, doubled up to the last, or of a list; raises AllocationError.

    >>> read_batches("6..40"), read_batches("8,3")
    ((6, 12, 24, 40), (3, 8))
    """
    low_text, dots, high_text = text.partition("..")
    try:
        if not dots:
            each = (parse_whole(part.strip(), most=MOST_BATCH) for part in text.split(","))
            return tuple(sorted(set(each)))
        low = parse_whole(low_text.strip(), least=1, most=MOST_BATCH)
        high = parse_whole(high_text.strip(), least=low, most=MOST_BATCH)
    except ValueError as error:
        raise AllocationError(
            f"{quoted(text)} are no batches ({error}); write one, or such as 1..64 or 8,12,16"
        ) from None
    found = [low]
    while found[-1] < high:
        found.append(min(2 * found[-1], high))
    return tuple(found)


def sweep_batches(
    allocations: Sequence[str], batches: Sequence[int], answer_of: Callable[[str, int], Estimate]
) -> list[BatchRow]:
    """Every allocation at every batch, and at the largest between the first and last that fits.

    Raises the first reason if none can be answered.
    """
    rows: list[BatchRow] = []
    errors: list[EstimatorError] = []
    for allocation in allocations:
        answers: dict[int, Estimate] = {}
        for batch in batches:
            try:
                answers[batch] = answer_of(allocation, batch)
            except (AllocationError, StrategyError, WorkloadError) as error:
                errors.append(error)
                rows.append(
                    BatchRow(allocation=allocation, batch=batch, answer=None, refusal=str(error))
                )
        largest = _largest(answers, allocation, answer_of)
        rows += [
            BatchRow(allocation=allocation, batch=batch, answer=answer, is_largest=batch == largest)
            for batch, answer in sorted(answers.items())
        ]
    if errors and not any(row.answer for row in rows):
        raise errors[0]
    return rows


def _largest(
    answers: dict[int, Estimate], allocation: str, answer_of: Callable[[str, int], Estimate]
) -> int | None:
    """The largest batch that fits, whose estimate is added; None where none does."""
    low = max((batch for batch, answer in answers.items() if answer.fits == "yes"), default=None)
    if low is None:
        return None
    high = min((batch for batch in answers if batch > low), default=low + 1)
    best = None
    while high - low > 1:
        middle = (low + high) // 2
        try:
            answer = answer_of(allocation, middle)
        except WorkloadError:  # a global batch is no multiple of it
            break
        if answer.fits == "yes":
            low, best = middle, answer
        else:
            high = middle
    if best is not None:
        answers[low] = best
    return low
