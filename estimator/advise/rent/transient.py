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
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from scipy.special import lambertw

from estimator.advise.rent.revocations import (
    HOUR_S,
    Lives,
    Rates,
    Revocations,
    check_from,
    presence,
)
from estimator.errors import WorkloadError, quoted
from estimator.placement.allocation import Allocation
from estimator.units import format_seconds


def best_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Work between checkpoints at which `expected_time_s` is least.

    Its derivative is 0 where (1 − x)·e^x = e^(−C/M), x = τ/M, which Lambert's W solves.

    >>> round(best_interval_s(1e-6, 10_000.0), 3)
    0.141
    """
    check_times(checkpoint_s=checkpoint_s, mtbf_s=mtbf_s)
    if math.isinf(mtbf_s):
        return math.inf
    ratio = checkpoint_s / mtbf_s
    if ratio < 1e-9:
        # W is next to its branch point, where its digits cancel; to first order it is √(2CM)
        # (J. W. Young, CACM 17, 1974).
        return math.sqrt(2 * checkpoint_s * mtbf_s)
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


def check_times(**values: float) -> None:
    """Raise WorkloadError where a time is not above 0; checkpoints and restarts may take none."""
    for name, value in values.items():
        if not (value >= 0 and (value > 0 or name in ("checkpoint_s", "restart_s"))):
            raise WorkloadError(f"{name} is {value:g}; give a time above 0, in seconds")


Row = TypeVar("Row")
# Workers that come and go by the hour are followed in steps of so long, for so many days.
_STEP_S, _FOLLOWED_S = 300.0, 40 * 24 * HOUR_S
# Multiples of the interval that would be best at the mean rate, of which the best is taken.
_INTERVALS = (0.5, 1.0, 2.0, 4.0)
# With which instances must stay long enough to keep a checkpoint at all.
_SHORTEST_S = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """What taking spot instances means: one that is taken sets the training back.

    `revocations` are those of each instance, for all or by machine type. Training starts at
    `start_hour` of the day; a checkpoint is written within the `warning_s` before a revocation if
    it fits. Raises WorkloadError.
    """

    revocations: Rates
    checkpoint_s: float = 60.0
    restart_s: float = 300.0
    warning_s: float = 0.0
    start_hour: float = 0.0

    def __post_init__(self) -> None:
        names = "checkpoint_s", "restart_s", "warning_s", "start_hour"
        check_from(0, **{name: getattr(self, name) for name in names})

    def check_named(self, machines: Iterable[str]) -> None:
        """Raise WorkloadError where revocations by machine type are not those of these."""
        if isinstance(self.revocations, Mapping) and (
            unlike := set(self.revocations) ^ set(machines)
        ):
            raise WorkloadError(
                f"revocations and machines do not both name {', '.join(sorted(unlike))}; name each "
                "machine in both"
            )

    def of_any(self, allocation: Allocation) -> Revocations:
        """The revocations of any of an allocation's instances; raises WorkloadError for unknown."""
        return Revocations.of_any(
            (group.nodes, self._of_machine(group.machine)) for group in allocation.groups
        )

    def _of_machine(self, machine: str | None) -> Revocations:
        if isinstance(self.revocations, Revocations):
            return self.revocations
        if machine is None or machine not in self.revocations:
            raise WorkloadError(
                f"it is not said how long a spot instance of {quoted(str(machine))} stays; "
                "give its revocations too"
            )
        return self.revocations[machine]

    def times_s(
        self, works_s: Sequence[float], revocations: Revocations, interval_s: float | None = None
    ) -> tuple[list[float], float]:
        """(expected times of works, work between checkpoints), the latter by default the best.

        `revocations` are those of any instance, each of which sets all back; see `Lives`. Where
        they come at one rate, without a warning that a checkpoint fits into, this is
        `expected_time_s`. Infinite where instances do not stay long enough to keep a checkpoint.
        """
        work_s, checkpoint_s, restart_s = works_s[0], self.checkpoint_s, self.restart_s
        costs = {"checkpoint_s": checkpoint_s, "restart_s": restart_s}
        lives = Lives(
            revocations=revocations, interval_s=_SHORTEST_S, warning_s=self.warning_s, **costs
        )
        if not lives.can_end:
            return [math.inf] * len(works_s), work_s
        if revocations.is_steady and not lives.is_warned:
            per_s = revocations.mean_per_s
            mtbf_s = 1 / per_s if per_s else math.inf
            if interval_s is None:
                interval_s = min(best_interval_s(checkpoint_s, mtbf_s), work_s)
            times = [expected_time_s(w, interval_s, **costs, mtbf_s=mtbf_s) for w in works_s]
            return times, interval_s
        if interval_s is None and lives.is_warned:
            interval_s = work_s
        if interval_s is None:
            began, most = self.start_hour, revocations.lifetime_s
            per_s = revocations.expected(work_s, began) / work_s + 1 / most
            best_s = best_interval_s(checkpoint_s, 1 / per_s) if per_s else math.inf
            most_s = min(work_s, 0.999 * most - restart_s - checkpoint_s)
            # Whole intervals.
            tried = {
                work_s / math.ceil(work_s / max(min(factor * best_s, most_s), 1e-6 * work_s) - 1e-9)
                for factor in _INTERVALS
            }
            interval_s = min(
                sorted(tried),
                key=lambda s: replace(lives, interval_s=s).expected_s([work_s], began)[0],
            )
        return replace(lives, interval_s=interval_s).expected_s(
            works_s, self.start_hour
        ), interval_s

    @property
    def assumptions(self) -> list[str]:
        """What the expected times take to be so, in sentences."""
        said = []
        rates = self.revocations
        known = [rates] if isinstance(rates, Revocations) else list(rates.values())
        if any(len(set(one.per_hour)) > 1 for one in known):
            hour, minute = divmod(round(self.start_hour % 24 * 60) % 1440, 60)
            said.append(f"training starts at {hour:02d}:{minute:02d}")
        if any(math.isfinite(one.lifetime_s) for one in known):
            said.append("a restart begins on new instances, all at once")
        if self.warning_s and self.checkpoint_s <= self.warning_s:
            said.append(
                f"a checkpoint of {format_seconds(self.checkpoint_s)} is written within the "
                f"{format_seconds(self.warning_s)} before a revocation, and none else"
            )
        elif self.warning_s:
            said.append(
                f"a warning of {format_seconds(self.warning_s)} is too short for a checkpoint of "
                f"{format_seconds(self.checkpoint_s)}"
            )
        return said


# Seconds of a checkpoint to cloud storage: 3.65 and 0.0199 for each MB.
_CHECKPOINT_S, _CHECKPOINT_S_PER_BYTE = 3.65, 0.0199e-6
# Seconds that a parameter server spends on a step of one worker.
_SERVER_S_PER_TENSOR, _SERVER_S_PER_BYTE = 0.109e-3, 1.32e-9


def checkpoint_s(size_bytes: float) -> float:
    """Seconds to keep a checkpoint of a size; raises WorkloadError.

    >>> round(checkpoint_s(100e6), 2)
    5.64
    """
    check_from(0, size_bytes=size_bytes)
    return _CHECKPOINT_S + _CHECKPOINT_S_PER_BYTE * size_bytes


def server_steps_per_s(tensors: int, size_bytes: float, servers: int = 1) -> float:
    """The most steps a second that parameter servers take from all workers together.

    Raises WorkloadError.

    >>> round(server_steps_per_s(100, 50e6), 2)
    13.0
    """
    check_from(1, tensors=tensors, servers=servers)
    check_from(0, size_bytes=size_bytes)
    return servers / (_SERVER_S_PER_TENSOR * tensors + _SERVER_S_PER_BYTE * size_bytes)


_NEVER = Revocations()


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker's own steps a second, and how often it is taken away."""

    steps_per_s: float
    revocations: Revocations = _NEVER

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
    warning_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.workers:
            raise WorkloadError("the cluster has no workers; give at least one")
        check_from(0, replace_s=self.replace_s, checkpoint_s=self.checkpoint_s)
        check_from(0, warning_s=self.warning_s)
        for name in ("checkpoint_every_steps", "most_steps_per_s"):
            if not getattr(self, name) > 0:
                raise WorkloadError(f"{name} is {getattr(self, name):g}; give a number above 0")

    def asynchronous_s(self, steps: float, start_hour: float = 0.0) -> float:
        """Expected time of asynchronous steps, of which a lost worker costs its own share.

        At one rate each worker is there a = 1/(1 + λ·d) of the time, λ its revocations and d the
        delay; the steps a second are the mean, over which of them are there, of what the servers
        take of their sum. All begin together, which gives each λ·d²·a²/2 more of its time (the
        second term of the renewal equation's Laplace transform at 0). With rates by the hour or a
        lifetime the odds that each is there are followed through the days from `start_hour` on.
        """
        check_from(0, steps=steps, start_hour=start_hour)
        if not all(worker.revocations.is_steady for worker in self.workers):
            return self._through_the_day_s(steps, start_hour)
        rates = [worker.revocations.mean_per_s for worker in self.workers]
        shares = [1 / (1 + per_s * self.replace_s) for per_s in rates]
        ahead_s = [
            per_s * (self.replace_s * share) ** 2 / 2
            for per_s, share in zip(rates, shares, strict=True)
        ]
        rate, small = self._mean_steps_per_s(shares), 1e-6
        sooner = [share + small * s for share, s in zip(shares, ahead_s, strict=True)]
        ahead = (self._mean_steps_per_s(sooner) - rate) / small
        return float((steps - ahead) / rate + self._checkpoints_s(steps))

    def _through_the_day_s(self, steps: float, start_hour: float) -> float:
        """When the mean of what is trained reaches the steps, each checkpoint a pause of all."""
        lifetimes_s = [worker.revocations.lifetime_s for worker in self.workers]
        step_s = min(_STEP_S, *lifetimes_s)
        count = math.ceil(_FOLLOWED_S / step_s)
        kinds = {worker.revocations for worker in self.workers}
        there = {
            kind: presence(
                kind, self.replace_s, begin_s=start_hour * HOUR_S, step_s=step_s, steps=count
            )
            for kind in kinds
        }
        shares = [there[worker.revocations] for worker in self.workers]
        rates = np.maximum(self._mean_steps_per_s(shares), 1e-300)
        rates = 1 / (1 / rates + self.checkpoint_s / self.checkpoint_every_steps)
        done = np.concatenate([[0.0], np.cumsum((rates[1:] + rates[:-1]) / 2 * step_s)])
        times_s = step_s * np.arange(count + 1.0)
        # The last checkpoint is kept whole.
        rest_s = self._checkpoints_s(steps) - steps / self.checkpoint_every_steps * (
            self.checkpoint_s
        )
        if steps <= done[-1]:
            return float(np.interp(steps, done, times_s)) + rest_s
        # As in the second half, in which all days are alike.
        half = count // 2
        per_s = (done[-1] - done[half]) / (times_s[-1] - times_s[half])
        return float(times_s[-1] + (steps - done[-1]) / per_s) + rest_s

    def _mean_steps_per_s(self, shares: Sequence[Any]) -> Any:
        """What servers take of workers' sums, each worker there for its share of the time."""
        odds_of: dict[float, Any] = {0.0: 1.0}
        for worker, share in zip(self.workers, shares, strict=True):
            odds_of = _joined(odds_of, worker.steps_per_s, share)
        return sum(odds * min(total, self.most_steps_per_s) for total, odds in odds_of.items())

    def synchronous_s(self, steps: float, start_hour: float = 0.0) -> float:
        """Expected time of synchronous steps, all of which a lost worker sets back.

        Each step takes as long as the slowest worker's; see `Spot.times_s`.
        """
        check_from(0, steps=steps, start_hour=start_hour)
        step_s = 1 / min(*(w.steps_per_s for w in self.workers), self.most_steps_per_s)
        if not steps:
            return 0.0
        of_any = Revocations.of_any((1, worker.revocations) for worker in self.workers)
        spot = Spot(
            revocations=of_any,
            checkpoint_s=self.checkpoint_s,
            restart_s=self.replace_s,
            warning_s=self.warning_s,
            start_hour=start_hour,
        )
        every_s = min(self.checkpoint_every_steps, steps) * step_s
        times_s, _ = spot.times_s([steps * step_s], of_any, every_s)
        return times_s[0]

    def _checkpoints_s(self, steps: float) -> float:
        return math.ceil(steps / self.checkpoint_every_steps) * self.checkpoint_s


def _joined(there: dict[float, Any], steps_per_s: float, share: Any) -> dict[float, Any]:
    """The odds of each sum of steps a second, with one more worker that is there for a share."""
    joined: dict[float, Any] = {}
    for total, odds in there.items():
        for more, part in ((0.0, 1 - share), (steps_per_s, share)):
            # Sums of equal workers must be one sum, in whatever order they are added.
            rate = float(f"{total + more:.9g}")
            joined[rate] = joined.get(rate, 0.0) + odds * part
    return joined


def pareto_front(rows: Iterable[Row], cost: Callable[[Row], tuple[float, float]]) -> list[Row]:
    """The rows that no other one beats in both numbers of `cost`, by the first; of equals, one.

    >>> pareto_front([(3, 1), (2, 2), (3, 2)], lambda row: row)
    [(2, 2), (3, 1)]
    """
    front: list[Row] = []
    for row in sorted(rows, key=cost):
        if not front or cost(row)[1] < cost(front[-1])[1]:
            front.append(row)
    return front
