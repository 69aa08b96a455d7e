"""Training on workers that come and go: checkpoints, spot instances, how many are worth it.

Failures are Poisson with `mtbf_s` between them. A failure loses what came after the last checkpoint
and costs `restart_s`, during which there may be another: J. T. Daly, "A higher order estimate of
the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22 (2006).

Figures and the sum of delays are CM-DARE's: S. Li et al., "Characterizing and Modeling Distributed
Training with Transient Cloud GPU Servers", ICDCS 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from scipy.special import lambertw

from estimator.elementwise import expected_maximum
from estimator.errors import WorkloadError, quoted
from estimator.placement.allocation import Allocation
from estimator.workload import check_count


def young_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Work between checkpoints, to first order: √(2CM) (J. W. Young, CACM 17, 1974).

    >>> young_interval_s(50.0, 10_000.0)
    1000.0
    """
    check_times(checkpoint_s=checkpoint_s, mtbf_s=mtbf_s)
    return math.sqrt(2 * checkpoint_s * mtbf_s)


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


# Restarts and checkpoints over the time between revocations, from which on nobody waits: e^20.
_MOST_TRIES = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """What taking spot instances means: one that is taken sets the training back.

    Each instance is revoked after `mtbf_s` on average, a time for all or one by machine type; see
    `expected_time_s`. Raises WorkloadError.
    """

    mtbf_s: float | Mapping[str, float]
    checkpoint_s: float = 60.0
    restart_s: float = 300.0

    def __post_init__(self) -> None:
        check_times(checkpoint_s=self.checkpoint_s, restart_s=self.restart_s)
        means_s = self.mtbf_s.values() if isinstance(self.mtbf_s, Mapping) else (self.mtbf_s,)
        for mtbf_s in means_s:
            check_times(mtbf_s=mtbf_s)

    def allocation_mtbf_s(self, allocation: Allocation) -> float:
        """The time between revocations of any of an allocation's instances."""
        return 1 / sum(group.nodes / self._mtbf_s(group.machine) for group in allocation.groups)

    def _mtbf_s(self, machine: str | None) -> float:
        if not isinstance(self.mtbf_s, Mapping):
            return self.mtbf_s
        if machine is None or machine not in self.mtbf_s:
            raise WorkloadError(
                f"it is not said how long a spot instance of {quoted(str(machine))} stays; give "
                "the time between its revocations too"
            )
        return self.mtbf_s[machine]

    def can_end(self, allocation: Allocation) -> bool:
        """Whether all instances stay long enough to keep a checkpoint."""
        tries = (self.checkpoint_s + self.restart_s) / self.allocation_mtbf_s(allocation)
        return tries < _MOST_TRIES

    def expected_s(self, work_s: float, allocation: Allocation) -> tuple[float, float]:
        """(expected time, work between checkpoints) of training on an allocation."""
        mtbf_s = self.allocation_mtbf_s(allocation)
        interval_s = min(best_interval_s(self.checkpoint_s, mtbf_s), work_s)
        times_s = expected_time_s(
            work_s,
            interval_s,
            checkpoint_s=self.checkpoint_s,
            restart_s=self.restart_s,
            mtbf_s=mtbf_s,
        )
        return times_s, interval_s


# Seconds of a checkpoint to cloud storage: 3.65 and 0.0199 for each MB.
_CHECKPOINT_S, _CHECKPOINT_S_PER_BYTE = 3.65, 0.0199e-6
# Seconds that a parameter server spends on a step of one worker.
_SERVER_S_PER_TENSOR, _SERVER_S_PER_BYTE = 0.109e-3, 1.32e-9


def checkpoint_s(size_bytes: float) -> float:
    """Seconds to keep a checkpoint of a size; raises WorkloadError.

    >>> round(checkpoint_s(100e6), 2)
    5.64
    """
    _check_from(0, size_bytes=size_bytes)
    return _CHECKPOINT_S + _CHECKPOINT_S_PER_BYTE * size_bytes


def server_steps_per_s(tensors: int, size_bytes: float, servers: int = 1) -> float:
    """The most steps a second that parameter servers take from all workers together.

    Raises WorkloadError.

    >>> round(server_steps_per_s(100, 50e6), 2)
    13.0
    """
    _check_from(1, tensors=tensors, servers=servers)
    _check_from(0, size_bytes=size_bytes)
    return servers / (_SERVER_S_PER_TENSOR * tensors + _SERVER_S_PER_BYTE * size_bytes)


def _check_from(least: float, **values: float) -> None:
    for name, value in values.items():
        if not least <= value < math.inf:
            raise WorkloadError(f"{name} is {value:g}; give a number from {least:g} on")


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocations:
    """How often a worker is taken away, by the hour of the day: 1 rate, or one for each of 24."""

    per_hour: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.per_hour) not in (1, 24) or not all(0 <= r <= 1e3 for r in self.per_hour):
            raise WorkloadError(
                f"revocations an hour are {self.per_hour}; give one number from 0 to 1000, or one "
                "for each of 24 hours"
            )

    @property
    def mean_per_s(self) -> float:
        """Over a day."""
        return math.fsum(self.per_hour) / len(self.per_hour) / 3600

    def expected(self, duration_s: float, start_hour: float = 0.0) -> float:
        """How many come in a time from an hour of the day on; raises WorkloadError."""
        _check_from(0, duration_s=duration_s, start_hour=start_hour)
        days, left_h = divmod(duration_s / 3600, 24)
        events, hour = days * 24 * self.mean_per_s * 3600, start_hour % 24
        while left_h > 1e-12:
            step_h = min(math.floor(hour) + 1 - hour, left_h)
            events += step_h * self.rate_per_hour(hour)
            hour, left_h = (hour + step_h) % 24, left_h - step_h
        return events

    def rate_per_hour(self, hour: float) -> float:
        """The rate at an hour of the day."""
        return self.per_hour[int(hour) % len(self.per_hour)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker's own steps a second, and how often it is taken away."""

    steps_per_s: float
    revocations: Revocations = Revocations(per_hour=(0.0,))

    def __post_init__(self) -> None:
        if not 0 < self.steps_per_s < math.inf:
            raise WorkloadError(
                f"a worker takes {self.steps_per_s:g} steps/s; give a number above 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransientCluster:
    """Workers, what replaces one that is taken away, and how often a checkpoint is kept.

    A worker is back `replace_s` after it was taken: the new one's start-up and its joining.
    `most_steps_per_s` is what the parameter servers take. All workers wait for a checkpoint.
    """

    workers: tuple[Worker, ...]
    replace_s: float
    checkpoint_s: float
    checkpoint_every_steps: float
    most_steps_per_s: float = math.inf

    def __post_init__(self) -> None:
        if not self.workers:
            raise WorkloadError("the cluster has no workers; give at least one")
        _check_from(0, replace_s=self.replace_s, checkpoint_s=self.checkpoint_s)
        for name in ("checkpoint_every_steps", "most_steps_per_s"):
            if not getattr(self, name) > 0:
                raise WorkloadError(f"{name} is {getattr(self, name):g}; give a number above 0")

    def asynchronous_s(self, steps: float) -> float:
        """Expected time of asynchronous steps, of which a lost worker costs its own share.

        Each worker is there a = 1/(1 + λ·d) of the time, λ its revocations and d the delay; the
        steps a second are the mean, over which of them are there, of what the servers take of their
        sum. All begin together, which gives each λ·d²·a²/2 more of its time (the second term of the
        renewal equation's Laplace transform at 0).
        """
        _check_from(0, steps=steps)
        rates = [worker.revocations.mean_per_s for worker in self.workers]
        shares = [1 / (1 + per_s * self.replace_s) for per_s in rates]
        ahead_s = [
            per_s * (self.replace_s * share) ** 2 / 2
            for per_s, share in zip(rates, shares, strict=True)
        ]
        rate, small = self._mean_steps_per_s(shares), 1e-6
        sooner = [share + small * s for share, s in zip(shares, ahead_s, strict=True)]
        ahead = (self._mean_steps_per_s(sooner) - rate) / small
        return (steps - ahead) / rate + self._checkpoints_s(steps)

    def _mean_steps_per_s(self, shares: Sequence[float]) -> float:
        """What servers take of workers' sums, each worker there for its share of the time."""
        odds_of: dict[float, float] = {0.0: 1.0}
        for worker, share in zip(self.workers, shares, strict=True):
            odds_of = _joined(odds_of, worker.steps_per_s, share)
        return sum(odds * min(total, self.most_steps_per_s) for total, odds in odds_of.items())

    def synchronous_s(self, steps: float) -> float:
        """Expected time of synchronous steps, all of which a lost worker sets back.

        Each step takes as long as the slowest worker's; see `expected_time_s`.
        """
        step_s = 1 / min(*(w.steps_per_s for w in self.workers), self.most_steps_per_s)
        per_s = sum(worker.revocations.mean_per_s for worker in self.workers)
        return expected_time_s(
            steps * step_s,
            self.checkpoint_every_steps * step_s,
            checkpoint_s=self.checkpoint_s,
            restart_s=self.replace_s,
            mtbf_s=1 / per_s if per_s else math.inf,
        )

    def _checkpoints_s(self, steps: float) -> float:
        return math.ceil(steps / self.checkpoint_every_steps) * self.checkpoint_s


def _joined(there: dict[float, float], steps_per_s: float, share: float) -> dict[float, float]:
    """The odds of each sum of steps a second, with one more worker that is there for a share."""
    joined: dict[float, float] = {}
    for total, odds in there.items():
        for more, part in ((0.0, 1 - share), (steps_per_s, share)):
            # Sums of equal workers must be one sum, in whatever order they are added.
            rate = float(f"{total + more:.9g}")
            joined[rate] = joined.get(rate, 0.0) + odds * part
    return joined


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotRow:
    """Training on some number of workers: expected time, and what they cost for as long."""

    workers: int
    interval_s: float
    expected_s: float
    usd: float


def spot_counts(
    counts: Iterable[int],
    work_s: Callable[[int], float],
    *,
    usd_per_hour: float,
    revocations: Revocations,
    checkpoint_s: float,
    restart_s: float,
) -> list[SpotRow]:
    """Synchronous training on each count of spot workers, any of which sets all back.

    `work_s` says how long a count would train without revocations. The checkpoint interval is the
    best for the count. Raises WorkloadError.
    """
    _check_from(0, usd_per_hour=usd_per_hour)
    rows = []
    for count in counts:
        _check_from(1, workers=count)
        per_s = count * revocations.mean_per_s
        mtbf_s, alone_s = (1 / per_s if per_s else math.inf), work_s(count)
        interval_s = min(best_interval_s(checkpoint_s, mtbf_s), alone_s)
        expected_s = expected_time_s(
            alone_s, interval_s, checkpoint_s=checkpoint_s, restart_s=restart_s, mtbf_s=mtbf_s
        )
        usd = count * usd_per_hour * expected_s / 3600
        rows.append(SpotRow(workers=count, interval_s=interval_s, expected_s=expected_s, usd=usd))
    return rows


def worth_it(rows: Sequence[SpotRow]) -> list[SpotRow]:
    """The rows that no other one beats in both time and cost, the fastest first."""
    front: list[SpotRow] = []
    for row in sorted(rows, key=lambda row: (row.expected_s, row.usd)):
        if not front or row.usd < front[-1].usd:
            front.append(row)
    return front
