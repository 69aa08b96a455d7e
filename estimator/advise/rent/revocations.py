"""Instances that are taken away more often at some hours than at others, and live for so long.

A synchronous training is a row of lives: each begins with a restart (the first does not), trains,
keeps checkpoints, and ends where any instance is revoked or all have reached their lifetime. The
next one begins on new instances, all at once, as managed spot jobs are launched again (SkyPilot's
recovery). Google's preemptible VMs end after 24 hours at the latest, 30 s after a notice
(cloud.google.com/compute/docs/instances/preemptible), EC2's spot instances two minutes after one.

The expected time from the end of a life on depends on the hour and on the work that is left, and
is a sum over when the next life ends: a renewal equation, solved on a grid of both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from estimator.elementwise import Array, Indices
from estimator.errors import WorkloadError, quoted
from estimator.files import read_csv
from estimator.units import parse_number, parse_whole

HOUR_S, DAY_S = 3600.0, 86400.0
# The grid: hours of the day, levels of work, and how long a stretch of a life is at most.
_TIMES, _MOST_LEVELS, _STRETCH_S = 48, 200, 300.0
_TIME_S = DAY_S / _TIMES
# Restarts and checkpoints over the time between revocations, from which on nobody waits: e^20.
_MOST_TRIES = 20.0
# What is longer is as slow as its second half: by then the day at which it began does not matter.
_LONGEST_S = 40 * DAY_S
_MOST_ROWS = 24_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocations:
    """How often an instance is taken away, by the hour of the day: 1 rate, or one for each of 24.

    None stays for longer than `lifetime_s`. Raises WorkloadError.
    """

    per_hour: tuple[float, ...] = (0.0,)
    lifetime_s: float = math.inf

    def __post_init__(self) -> None:
        if len(self.per_hour) not in (1, 24) or not all(0 <= r < math.inf for r in self.per_hour):
            raise WorkloadError(
                f"revocations an hour are {self.per_hour}; give one number from 0 on, or one for "
                "each of 24 hours"
            )
        if not self.lifetime_s > 0:
            raise WorkloadError(f"lifetime_s is {self.lifetime_s:g}; give a time above 0")

    @classmethod
    def of_any(cls, parts: Iterable[tuple[int, Revocations]]) -> Revocations:
        """Those of any of so many instances of each kind, the first of which ends a life."""
        known = list(parts)
        by_hour = [[count * rate for rate in one.hours()] for count, one in known]
        return cls(
            per_hour=tuple(math.fsum(rates) for rates in zip(*by_hour, strict=True)),
            lifetime_s=min((one.lifetime_s for _, one in known), default=math.inf),
        )

    def hours(self) -> tuple[float, ...]:
        """The rate of each of 24 hours."""
        return self.per_hour if len(self.per_hour) == 24 else self.per_hour * 24

    @property
    def is_steady(self) -> bool:
        """Whether they come at one rate, however old an instance is."""
        return len(set(self.per_hour)) == 1 and math.isinf(self.lifetime_s)

    @property
    def mean_per_s(self) -> float:
        """Over a day, without the ends of lifetimes."""
        return math.fsum(self.per_hour) / len(self.per_hour) / HOUR_S

    def expected(self, duration_s: float, start_hour: float = 0.0) -> float:
        """How many come in a time from an hour of the day on; raises WorkloadError."""
        check_from(0, duration_s=duration_s, start_hour=start_hour)
        start_s = start_hour * HOUR_S
        begin, end = self.since_midnight(np.array([start_s, start_s + duration_s])).tolist()
        return float(end - begin)

    def since_midnight(self, times_s: Array) -> Array:
        """How many come, on average, from the first midnight to each time after it."""
        sums = np.concatenate([[0.0], np.cumsum(self.hours())])
        days, left_s = np.divmod(times_s, DAY_S)
        return np.asarray(days * sums[-1] + np.interp(left_s / HOUR_S, np.arange(25.0), sums))


# Of every instance, or by machine type.
Rates = Revocations | Mapping[str, Revocations]


def check_from(least: float, **values: float) -> None:
    """Raise WorkloadError where a value is below, or not a finite number."""
    for name, value in values.items():
        if not least <= value < math.inf:
            raise WorkloadError(f"{name} is {value:g}; give a number from {least:g} on")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lives:
    """What a life of a training costs: its restart, and a checkpoint after every interval of work.

    A checkpoint that fits into the `warning_s` before a revocation is written then, and keeps all
    that was trained.
    """

    revocations: Revocations
    interval_s: float
    checkpoint_s: float
    restart_s: float
    warning_s: float = 0.0

    @property
    def is_warned(self) -> bool:
        return self.checkpoint_s <= self.warning_s and self.warning_s > 0

    @property
    def can_end(self) -> bool:
        """Whether lives are long enough, at some hour at least, to restart and keep something."""
        kept_s = self.restart_s + self.checkpoint_s
        tries = kept_s * min(self.revocations.hours()) / HOUR_S
        least_s = kept_s if self.is_warned else kept_s + self.interval_s
        return tries < _MOST_TRIES and least_s < self.revocations.lifetime_s

    def length_s(self, work_s: Array) -> Array:
        """From the end of the restart until so much work is done and kept."""
        checkpoints = np.ceil(work_s / self.interval_s - 1e-9)
        return np.asarray(work_s + checkpoints * self.checkpoint_s)

    def kept_s(self, begin_s: Array, end_s: Array) -> Array:
        """Work that a life keeps which ends between two times after its restart, on average."""
        period_s = self.interval_s + self.checkpoint_s
        if self.is_warned:
            at_s = np.maximum((begin_s + end_s) / 2 - self.checkpoint_s, 0.0)
            whole, left_s = np.divmod(at_s, period_s)
            return np.asarray(whole * self.interval_s + np.minimum(left_s, self.interval_s))

        def summed(periods: Array) -> Array:
            # The integral of the floor.
            whole = np.floor(periods)
            return np.asarray(whole * (whole - 1) / 2 + whole * (periods - whole))

        begin, end = (np.maximum(at_s, 0.0) / period_s + 1e-12 for at_s in (begin_s, end_s))
        span = np.maximum(end - begin, 1e-12)
        mean = np.where(end - begin > 1e-9, (summed(end) - summed(begin)) / span, np.floor(end))
        return np.asarray(mean * self.interval_s)

    def expected_s(self, works_s: Sequence[float], start_hour: float = 0.0) -> list[float]:
        """The expected times of works from an hour on; infinite where none would end.

        Works above some weeks go on as the weeks before did.
        """
        longest_s = max(works_s)
        if not self.can_end:
            return [math.inf] * len(works_s)
        most_s = min(longest_s, _LONGEST_S)
        table = _TimesLeft(self, most_s)
        near = [table.from_start_s(min(work_s, most_s), start_hour * HOUR_S) for work_s in works_s]
        if longest_s <= most_s:
            return near
        parts_s = np.linspace(most_s / 2, most_s, 33)
        ends_s = [table.from_start_s(part_s, start_hour * HOUR_S) for part_s in parts_s.tolist()]
        slope = float(np.polyfit(parts_s, ends_s, 1)[0])
        return [
            time_s + slope * max(work_s - most_s, 0.0)
            for time_s, work_s in zip(near, works_s, strict=True)
        ]


class _Stretches(NamedTuple):
    """Parts of lives that begin at some times (rows), in order (columns).

    How likely each ends a life, when after its begin on average, the work kept by then, and the
    time that lives spend in it.
    """

    odds: Array
    ends_s: Array
    kept_s: Array
    spent_s: Array


class _TimesLeft:
    """Expected times after the end of a life, by the time of day and by how much work is left."""

    def __init__(self, lives: Lives, work_s: float) -> None:
        self.lives = lives
        pieces = math.ceil(work_s / lives.interval_s - 1e-9)
        in_whole = pieces <= _MOST_LEVELS and not lives.is_warned
        self.levels = pieces if in_whole else _MOST_LEVELS
        self.step_s = lives.interval_s if in_whole else work_s / self.levels
        self.values_s = np.zeros((self.levels + 1, _TIMES))
        self._solve()

    def from_start_s(self, work_s: float, start_s: float) -> float:
        """The expected time of work that begins at a time of the day, without a restart."""
        if not self.can_end:
            return math.inf
        stages_s = self.lives.length_s(np.array([work_s]))
        life = self._stretches(np.array([[start_s]]), self._bounds_s(stages_s), 0.0)
        left = np.maximum(work_s - life.kept_s, 0.0) / self.step_s
        level, time = np.broadcast_arrays(left, (start_s + life.ends_s) / _TIME_S)
        after_s = np.zeros(level.shape)
        for low, high_share in _between(level):
            for early, late_share in _between(time):
                values_s = self.values_s[np.minimum(low, self.levels), early % _TIMES]
                after_s += high_share * late_share * values_s
        return float((life.spent_s + life.odds * after_s).sum())

    def _bounds_s(self, stages_s: Array) -> Array:
        """The begins and ends of the stretches of a life, where stages of work end and between.

        Where all reach their lifetime before, the last one has no length.
        """
        begins_s = np.concatenate([[0.0], stages_s[:-1]])
        bounds_s = np.concatenate(
            [
                *(
                    np.linspace(begin_s, end_s, math.ceil((end_s - begin_s) / _STRETCH_S), False)
                    for begin_s, end_s in zip(begins_s.tolist(), stages_s.tolist(), strict=True)
                ),
                stages_s[-1:],
            ]
        )
        limit_s = self.lives.revocations.lifetime_s
        if bounds_s[-1] <= limit_s:
            return bounds_s
        return np.concatenate([bounds_s[bounds_s < limit_s], [limit_s, limit_s]])

    def _stretches(self, begins_s: Array, bounds_s: Array, restart_s: float) -> _Stretches:
        """How lives end that begin at times (a column)."""
        revocations = self.lives.revocations
        hazard = revocations.since_midnight(begins_s + bounds_s)
        stays = np.exp(hazard[:, :1] - hazard)
        if bounds_s[-1] == revocations.lifetime_s == bounds_s[-2]:
            stays[:, -1] = 0.0
        odds, spans_s = -np.diff(stays, axis=1), np.diff(bounds_s)
        # At a constant rate within each: 1/x − 1/(e^x − 1) of it is left behind by one that ends.
        mass = np.clip(np.diff(hazard, axis=1), 1e-9, 700.0)
        place = np.where(mass > 1e-3, 1 / mass - 1 / np.expm1(mass), 0.5)
        return _Stretches(
            odds=odds,
            ends_s=bounds_s[:-1] + place * spans_s,
            kept_s=self.lives.kept_s(bounds_s[:-1] - restart_s, bounds_s[1:] - restart_s),
            spent_s=np.where(mass > 1e-6, odds / mass, stays[:, :-1]) * spans_s,
        )

    def _solve(self) -> None:
        """Fill in `values_s` level by level: each is a sum over how the next life ends."""
        restart_s = self.lives.restart_s
        works_s: Array = self.step_s * np.arange(1.0, self.levels + 1)
        stages_s = restart_s + self.lives.length_s(works_s)
        bounds_s = self._bounds_s(stages_s)
        begins_s: Array = _TIME_S * np.arange(float(_TIMES))[:, None]
        life = self._stretches(begins_s, bounds_s, restart_s)
        # A level is done where its own stage ends: stretches of later stages are not its own.
        stage = np.searchsorted(stages_s, bounds_s[:-1] + 1e-6, "right")
        spent_s = np.zeros((_TIMES, self.levels + 1))
        np.add.at(spent_s.T, np.minimum(stage, self.levels), life.spent_s.T)
        spent_s = np.cumsum(spent_s, axis=1)
        every = self._transitions(life)
        late = self._transitions(life, stage)
        last = every - late
        flat = every.reshape(_TIMES, -1)
        # At some time of day one life in e^20 must get anywhere.
        self.can_end = all(
            float((1 - own[:, 0].sum(axis=1)).max()) > math.exp(-_MOST_TRIES)
            for own in (last, every)
        )
        if not self.can_end:
            return
        first, other = (np.linalg.inv(np.eye(_TIMES) - own[:, 0]) for own in (last, every))
        # Values of lower levels stand behind those of higher ones.
        stacked = np.zeros((self.levels + 1) * _TIMES)
        for level in range(1, self.levels + 1):
            begin = (self.levels - level) * _TIMES
            value_s = spent_s[:, level - 1].copy()
            if level > 1:
                value_s += last[:, level - 1] @ self.values_s[1]
                less = (level - 1) * _TIMES
                value_s += flat[:, _TIMES:less] @ stacked[begin + _TIMES : begin + less]
            value_s = (other if level > 1 else first) @ value_s
            self.values_s[level] = stacked[begin : begin + _TIMES] = value_s

    def _transitions(self, life: _Stretches, stage: Indices | None = None) -> Array:
        """The odds from each time of day (rows) to so many levels less and a time of day.

        With the `stage` of each stretch only those of later stages than the levels that they keep.
        """
        size = _TIMES, self.levels + 1, _TIMES
        rows = np.arange(_TIMES)[:, None]
        times = rows + life.ends_s / _TIME_S
        odds = np.zeros(size)
        for level, level_share in _between(life.kept_s / self.step_s):
            kept = np.minimum(level, self.levels)
            shares = level_share * (level <= self.levels)
            if stage is not None:
                shares = shares * (stage > level)
            for time, time_share in _between(times):
                place = (rows * size[1] + kept) * _TIMES + time % _TIMES
                weights = life.odds * shares * time_share
                odds += np.bincount(place.ravel(), weights.ravel(), odds.size).reshape(size)
        return odds


def _between(values: Array) -> tuple[tuple[Indices, Array], tuple[Indices, Array]]:
    """The whole numbers below and above each value, with their shares in it."""
    low = np.floor(values + 1e-9).astype(np.intp)
    high_share = np.clip(values - low, 0.0, 1.0)
    return (low, 1 - high_share), (low + 1, high_share)


def presence(
    revocations: Revocations, replace_s: float, *, begin_s: float, step_s: float, steps: int
) -> Array:
    """The odds that a worker is there, at the ends of so many steps of time from its begin on.

    Whenever it is taken, another one begins its own life `replace_s` later. The renewal equation by
    the trapezoidal rule: what is lost in a step is lost in its middle, of the mean of who is there.
    """
    hazard = revocations.since_midnight(begin_s + step_s * np.arange(steps + 1.0))
    # No more than all of those who are there at first.
    rates = np.minimum(np.diff(hazard), 2.0).tolist()
    life = round(min(revocations.lifetime_s / step_s, steps + 1.0))
    later, late_share = divmod(replace_s / step_s, 1.0)
    soon, now_share = int(later), 0.0 if later else 1 - late_share
    begun = np.zeros(steps + soon + 2)
    begun[0] = 1.0
    there = np.ones(steps + 1)
    now = 1.0
    for step, rate in enumerate(rates):
        expired = 0.0
        if step + 1 >= life:
            old = step + 1 - life
            expired = float(begun[old] * np.exp(hazard[old] - hazard[step + 1]))
        before, half = now, rate / 2 * (1 - now_share)
        arrived = float(begun[step]) if step else 0.0
        now = (before * (1 - half) + arrived - expired * (1 - now_share)) / (1 + half)
        lost = rate * (before + now) / 2 + expired
        begun[step] += now_share * lost
        if soon:
            begun[step + soon] += lost * (1 - late_share)
        begun[step + soon + 1] += lost * late_share
        there[step + 1] = now
    return there


def read_revocations(text: str, lifetime_s: float = math.inf) -> Rates:
    """24 rates, separated by commas, or a CSV with ``hour,per_hour`` and maybe ``machine``.

    A CSV has a line for each hour, 0 to 23, of each machine. Raises WorkloadError.
    """
    if not text.endswith(".csv"):
        try:
            rates = tuple(parse_number(each) for each in text.split(","))
        except ValueError as error:
            raise WorkloadError(
                f"revocations are 24 rates an hour, separated by commas, or a .csv file: {error}"
            ) from None
        return Revocations(per_hour=rates, lifetime_s=lifetime_s)
    by_machine: dict[str, dict[int, float]] = {}
    try:
        rows = read_csv(text, most_rows=_MOST_ROWS)
        columns = next(rows, [])
        if not {"hour", "per_hour"} <= {*columns}:
            raise WorkloadError(f"{text} has no rates; begin it with hour,per_hour")
        for number, row in enumerate(rows, start=2):
            cell = dict(zip(columns, row, strict=False))
            try:
                hour = parse_whole(cell.get("hour", ""), least=0, most=23)
                rates_of = by_machine.setdefault(cell.get("machine", ""), {})
                if hour in rates_of:
                    raise ValueError(f"hour {hour} stands twice; write it once")
                rates_of[hour] = parse_number(cell.get("per_hour", ""))
            except ValueError as error:
                raise WorkloadError(f"{text}, line {number}: {error}") from None
    except OSError as error:
        raise WorkloadError(f"cannot read {text} ({error.strerror}); check the path") from None
    except ValueError as error:
        raise WorkloadError(f"cannot read {text}: {error}") from None
    found: dict[str, Revocations] = {}
    for machine, hours in by_machine.items():
        if len(hours) != 24:
            about = f" of {quoted(machine)}" if machine else ""
            raise WorkloadError(f"{text} has {len(hours)} hours{about}; give a line for each of 24")
        rates = tuple(hours[hour] for hour in range(24))
        found[machine] = Revocations(per_hour=rates, lifetime_s=lifetime_s)
    if not found:
        raise WorkloadError(f"{text} has no lines; give one for each of 24 hours")
    return found[""] if len(found) == 1 and "" in found else found
