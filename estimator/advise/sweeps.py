"""Estimate a model on a whole pattern of allocations, such as ``1..8x1..8:local``."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

from estimator.advise.scaling import linear_step_s
from estimator.errors import (
    AllocationError,
    EstimatorError,
    StrategyError,
    WorkloadError,
    quoted,
)
from estimator.estimates import Estimate
from estimator.placement.grid import AllocationGrid
from estimator.tables.workers import map_shared

_MOST_ROWS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One allocation of a sweep: its estimate, or why there is none.

    `efficiency_ratio` is throughput per rank over that of the sweep's smallest allocation, with the
    share of the update that the ranks of this one have (`scaling.linear_step_s`).
    """

    allocation: str
    answer: Estimate | None
    refusal: str = ""
    efficiency_ratio: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in base units."""
        row: dict[str, Any] = {"allocation": self.allocation, "refusal": self.refusal or None}
        if self.answer is not None:
            row |= {
                "ranks": self.answer.ranks,
                "step_time_s": self.answer.step_time_s,
                "low_s": self.answer.low_s,
                "high_s": self.answer.high_s,
                "samples_per_s": self.answer.samples_per_s,
                "efficiency_ratio": self.efficiency_ratio,
                "peak_memory_bytes": self.answer.peak_memory_bytes,
                "fits": self.answer.fits,
                **self.answer.bottleneck_dict(),
            }
        return row


def expand_pattern(pattern: str) -> Iterator[str]:
    """Every allocation of a pattern, whose counts are numbers, ranges with both ends, or lists.

    Parts joined by ``+`` combine freely. Raises AllocationError.

    >>> list(expand_pattern("1..2x1..2:local"))
    ['1x1:local', '1x2:local', '2x1:local', '2x2:local']
    >>> list(expand_pattern("1,4x8:dgx-a100"))
    ['1x8:dgx-a100', '4x8:dgx-a100']
    """
    grid = AllocationGrid(pattern)
    if len(grid) > _MOST_ROWS:
        raise AllocationError(
            f"{quoted(pattern)} names more than {_MOST_ROWS} allocations; write narrower ranges or "
            "call estimate_chunks with an AllocationGrid"
        )
    yield from grid.texts()


def existing(patterns: Sequence[str], exists: Callable[[str], bool]) -> list[str]:
    """The allocations of the patterns that exist, or the first of all if none does."""
    texts = [text for pattern in patterns for text in expand_pattern(pattern)]
    return [text for text in texts if exists(text)] or texts[:1]


def sweep(
    patterns: Sequence[str],
    answer_of: Callable[[str], Estimate],
    *,
    executor: Executor | None = None,
) -> list[SweepRow]:
    """Estimate every allocation of the patterns; those that do not exist keep their reason.

    So do those over whose ranks a strategy or a batch cannot be divided. With an `executor` they
    are estimated on its workers, to each of which `answer_of` is sent once, as it is pickled:
    ``functools.partial(est.estimate, graph)``. Raises the first of these reasons if none can be
    answered.
    """
    rows: list[SweepRow] = []
    shares: list[float] = []
    errors: list[EstimatorError] = []
    texts = (text for pattern in patterns for text in expand_pattern(pattern))
    for text, found in map_shared(executor, _answer, answer_of, texts):
        answer, share = (None, 1.0) if isinstance(found, EstimatorError) else found
        refusal = str(found) if isinstance(found, EstimatorError) else ""
        errors += [found] if isinstance(found, EstimatorError) else []
        rows.append(SweepRow(allocation=text, answer=answer, refusal=refusal))
        shares.append(share)
    answers = [row.answer for row in rows if row.answer is not None]
    if not answers:
        raise errors[0] if errors else AllocationError("the sweep names no allocation")
    smallest = min(answers, key=lambda answer: answer.ranks)
    if executor is not None:
        # What comes from a worker has no plan of its operators.
        smallest = answer_of(str(smallest.allocation))
    return [
        SweepRow(
            allocation=row.allocation,
            answer=row.answer,
            refusal=row.refusal,
            efficiency_ratio=_efficiency(row.answer, smallest, share) if row.answer else None,
        )
        for row, share in zip(rows, shares, strict=True)
    ]


def _answer(
    answer_of: Callable[[str], Estimate], _kept: dict[str, Any], text: str
) -> tuple[Estimate, float] | EstimatorError:
    """The estimate of an allocation and the share of the update of a rank, or why there is none."""
    try:
        answer = answer_of(text)
    except (AllocationError, StrategyError, WorkloadError) as error:
        return error
    return answer, answer.plan.share


def _efficiency(answer: Estimate, smallest: Estimate, share: float) -> float | None:
    if answer.samples_per_s is None or not smallest.samples_per_s:
        return None
    whole = (answer.samples_per_s / answer.ranks) / (smallest.samples_per_s / smallest.ranks)
    return whole * (linear_step_s(smallest, share=share) / smallest.step_time_s)


class Row(Protocol):
    """A row of a table with values in base units."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values by column."""


def sweep_csv(rows: Sequence[Row]) -> str:
    """The rows as comma-separated values in base units, with a heading."""
    tables = [_flat(row.to_dict()) for row in rows]
    names = max(tables, key=len)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(tables)
    return text.getvalue()


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Objects in a row as columns, such as bottleneck_part."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        parts = value if isinstance(value, dict) else None
        flat |= {name: value} if parts is None else {f"{name}_{k}": v for k, v in parts.items()}
    return flat
