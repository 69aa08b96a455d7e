"""How often to keep a checkpoint, and how long training takes among failures.

Failures are Poisson with `mtbf_s` between them. A failure loses what came after the last checkpoint
and costs `restart_s`, during which there may be another: J. T. Daly, "A higher order estimate of
the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22 (2006).
"""

from __future__ import annotations

import math

from scipy.special import lambertw

from estimator.elementwise import expected_maximum
from estimator.errors import WorkloadError
from estimator.workload import check_count


def young_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Work between checkpoints, to first order: √(2CM) (J. W. Young, CACM 17, 1974).

    >>> young_interval_s(50.0, 10_000.0)
    1000.0
    """
    check_times(checkpoint_s=checkpoint_s, mtbf_s=mtbf_s)
    return math.sqrt(2 * checkpoint_s * mtbf_s)


def daly_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Work between checkpoints, to higher order (Daly 2006, "higher order")."""
    young_s, half = young_interval_s(checkpoint_s, mtbf_s), checkpoint_s / (2 * mtbf_s)
    if half >= 1:
        return mtbf_s
    return young_s * (1 + math.sqrt(half) / 3 + half / 9) - checkpoint_s


def best_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Work between checkpoints at which `expected_time_s` is least.

    Its derivative is 0 where (1 − x)·e^x = e^(−C/M), x = τ/M, which Lambert's W solves.
    """
    check_times(checkpoint_s=checkpoint_s, mtbf_s=mtbf_s)
    if math.isinf(mtbf_s):
        return math.inf
    ratio = checkpoint_s / mtbf_s
    if ratio < 1e-9:
        # W is next to its branch point, where its digits cancel; Young's is then exact.
        return young_interval_s(checkpoint_s, mtbf_s)
    return mtbf_s * (1 + float(lambertw(-math.exp(-1 - ratio)).real))


def expected_time_s(
    work_s: float,
    interval_s: float,
    *,
    checkpoint_s: float,
    restart_s: float,
    mtbf_s: float,
) -> float:
    """Time of `work_s` of training with a checkpoint after every `interval_s` of it.

    M·e^(R/M)·(e^((τ+C)/M) − 1)·W/τ (Daly 2006, "complete"); infinite where no float holds it.
    """
    check_times(work_s=work_s, interval_s=interval_s, checkpoint_s=checkpoint_s, mtbf_s=mtbf_s)
    check_times(restart_s=restart_s)
    interval_s = min(interval_s, work_s)
    if math.isinf(mtbf_s):
        return work_s * (1 + checkpoint_s / interval_s)
    try:
        tries = math.exp(restart_s / mtbf_s) * math.expm1((interval_s + checkpoint_s) / mtbf_s)
    except OverflowError:
        return math.inf
    return mtbf_s * tries * work_s / interval_s


def goodput_ratio(
    *,
    checkpoint_s: float,
    restart_s: float,
    mtbf_s: float,
    ranks: int = 1,
    jitter_ratio: float = 0.0,
) -> float:
    """The share of time that is training which counts, at the best interval.

    Every step waits for the slowest of its ranks, whose times have a standard deviation of
    `jitter_ratio` (a profile's `rank_jitter_ratio`). Raises WorkloadError.

    >>> round(goodput_ratio(checkpoint_s=60, restart_s=600, mtbf_s=10800), 3)
    0.85
    >>> costs = {"checkpoint_s": 60, "restart_s": 600, "mtbf_s": 10800}
    >>> round(goodput_ratio(ranks=1000, jitter_ratio=0.013, **costs), 3)
    0.816
    """
    check_count(ranks, "ranks", most=10**9)
    if not 0 <= jitter_ratio < math.inf:
        raise WorkloadError(f"jitter_ratio is {jitter_ratio:g}; give a number from 0 on")
    waits = 1 + jitter_ratio * expected_maximum(ranks)
    interval_s = best_interval_s(checkpoint_s, mtbf_s)
    if math.isinf(interval_s):
        return 1 / waits
    expected_s = expected_time_s(
        interval_s, interval_s, checkpoint_s=checkpoint_s, restart_s=restart_s, mtbf_s=mtbf_s
    )
    return interval_s / expected_s / waits


def check_times(**values: float) -> None:
    """Raise WorkloadError where a time is not above 0; checkpoints and restarts may take none."""
    for name, value in values.items():
        if not (value >= 0 and (value > 0 or name in ("checkpoint_s", "restart_s"))):
            raise WorkloadError(f"{name} is {value:g}; give a time above 0, in seconds")
