"""Answer what another loader would give: more workers, more of the data cached, a faster disk.

The queue model of the estimate answers; beside it stands DS-Analyzer's baseline (Mohan et al., VLDB
2021), the least of three rates: G without loading, P of the loader alone from a warm cache, F of
storage, where a share x of the bytes comes from memory and the rest from the disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from estimator.errors import WorkloadError
from estimator.estimates import Estimate
from estimator.timeline.inputs import with_rates
from estimator.units import format_bandwidth, format_ratio
from estimator.workload.loader import MOST_WORKERS, Loader

CACHED_RATIOS = (0.0, 0.35, 0.5, 0.65, 1.0)
# Data that makes a step less than this share longer does not hold it back.
HIDDEN_RATIO = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """One change of the loader: the throughput by the queue model, and by the least of G, P, F."""

    change: str
    samples_per_s: float
    input_stall_s: float
    baseline_samples_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InputAnswers:
    """What a loader gives as it is, and what others would.

    `workers_needed` are the fewest per rank that hide all that workers can hide, `cached_needed`
    the least share of the samples in the page cache that hides the disk; None: none would.
    """

    as_it_is: WhatIf
    changes: tuple[WhatIf, ...]
    without_samples_per_s: float
    prep_samples_per_s: float
    fetch_samples_per_s: float
    workers_needed: int | None
    cached_needed: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in base units; rates that nothing limits are None."""
        plain = asdict(self)
        for name in ("prep_samples_per_s", "fetch_samples_per_s"):
            plain[name] = None if math.isinf(plain[name]) else plain[name]
        return plain


def input_answers(loader: Loader, answer_of: Callable[[Loader | None], Estimate]) -> InputAnswers:
    """What `loader` and its changes give; `answer_of` estimates a step with a loader or without.

    Raises WorkloadError for a graph without a batch size.
    """
    without = answer_of(None)
    loader = with_rates(loader, without.plan.placement.kinds[0].profile)
    if without.samples_per_s is None:
        raise WorkloadError(
            f"{without.model} has no samples to count; trace it with a batch whose first dimension "
            "is the sample"
        )
    compute_per_s: float = without.samples_per_s

    def tried(change: str, other: Loader) -> WhatIf:
        answer = answer_of(other)
        assert answer.samples_per_s is not None
        return WhatIf(
            change=change,
            samples_per_s=answer.samples_per_s,
            input_stall_s=float(answer.breakdown.input_stall_s),
            baseline_samples_per_s=min(compute_per_s, *_rates(other, without)),
        )

    def stall_s(other: Loader) -> float:
        return float(answer_of(other).breakdown.input_stall_s)

    prep_per_s, fetch_per_s = _rates(loader, without)
    hidden_s = HIDDEN_RATIO * without.step_time_s
    return InputAnswers(
        as_it_is=tried("as it is", loader),
        changes=tuple(tried(change, other) for change, other in _changes(loader)),
        without_samples_per_s=compute_per_s,
        prep_samples_per_s=prep_per_s,
        fetch_samples_per_s=fetch_per_s,
        workers_needed=_workers_needed(loader, stall_s, hidden_s),
        cached_needed=_cached_needed(loader, stall_s, hidden_s),
    )


def _rates(loader: Loader, answer: Estimate) -> tuple[float, float]:
    """(P, F): samples per second of all ranks that workers prepare, and that storage gives."""
    makers = answer.ranks * max(loader.workers, 1)
    warm = replace(loader, cached_ratio=1.0)
    made_s, read_s = warm.made_s(1.0), loader.read_s(1.0)
    return (
        makers / made_s if made_s else math.inf,
        answer.plan.placement.nodes / read_s if loader.disk_s(1.0) else math.inf,
    )


def _changes(loader: Loader) -> Iterator[tuple[str, Loader]]:
    more = max(2 * loader.workers, 1)
    yield f"{more} workers", loader.with_workers(more)
    disk = loader.disk_bytes_per_s
    if disk is not None:
        faster = f"a disk of {format_bandwidth(2 * disk)}"
        yield faster, replace(loader, disk_bytes_per_s=2 * disk)
        for ratio in CACHED_RATIOS:
            yield f"{format_ratio(ratio)} cached", replace(loader, cached_ratio=ratio)
    if loader.cores is not None:
        yield f"{2 * loader.cores} cores", replace(loader, cores=2 * loader.cores)


def _workers_needed(
    loader: Loader, stall_s: Callable[[Loader], float], hidden_s: float
) -> int | None:
    """By bisection, since more workers never wait longer; None where the most of them still do."""
    least_s = stall_s(loader.with_workers(MOST_WORKERS))
    if stall_s(loader.with_workers(0)) <= hidden_s:
        return 0
    low, high = 0, MOST_WORKERS
    while high - low > 1:
        middle = (low + high) // 2
        enough = stall_s(loader.with_workers(middle)) <= least_s + hidden_s
        low, high = (low, middle) if enough else (middle, high)
    return high if stall_s(loader.with_workers(high)) < stall_s(loader.with_workers(0)) else None


def _cached_needed(
    loader: Loader, stall_s: Callable[[Loader], float], hidden_s: float
) -> float | None:
    if loader.disk_bytes_per_s is None:
        return None
    most_s = stall_s(replace(loader, cached_ratio=1.0)) + hidden_s
    if stall_s(replace(loader, cached_ratio=0.0)) <= most_s:
        return 0.0
    low, high = 0.0, 1.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        enough = stall_s(replace(loader, cached_ratio=middle)) <= most_s
        low, high = (low, middle) if enough else (middle, high)
    return high
