"""Elastic policies that climb curves of believed speed: max-min, AFS-L and Optimus.

`Pools` lets policies for one machine type run on several, each job on one type at a time.
"""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from estimator.replay.view import Grant, View, Waiting

Array = NDArray[np.float64]
# Believed throughput by count.
Curve = Mapping[int, float]

# What all jobs together must gain, in the sum of logarithms of rates, for one to change its pool.
_MOVE_GAIN = 0.1
# Devices beside those of a job's pool must bring so much, for a job of at least so long.
_SPARE_GAIN_RATIO = 1.1
_SPARE_LEAST_S = 600.0
# Longest jobs first: those that are asked whether spare devices would pay.
_MOST_OFFERS = 8
_NEVER = -1e9


class Pools:
    """A policy for devices of one machine type, run on each type's pool of jobs.

    Jobs are dealt to pools so that the product of their rates on equal shares of the pools is
    highest (Nash welfare; Nash 1950), by joining the best pool on arrival and by moves that gain.
    Devices that the pools leave are added to long jobs of other pools where the engine believes
    that the unlike devices together are faster; this extension is our own. With one machine type
    there is one pool and nothing is added.
    """

    interval_s = 0.0
    moves_jobs = True

    @abstractmethod
    def share(self, view: View) -> dict[str, Grant]:
        """Grants to the jobs of a pool."""

    def plan(self, view: View) -> dict[str, Grant]:
        """Grants of all pools, with what they leave."""
        grants: dict[str, Grant] = {}
        for machine, jobs in pools(view).items():
            grants |= self.share(view.of(machine, jobs))
        return with_spare_devices(grants, view) if len(view.machines) > 1 else grants


def pools(view: View) -> dict[str, list[Waiting]]:
    """The jobs of each machine type; a job that fits nowhere now is in none."""
    machines = [machine for machine in view.machines if view.nodes.total(machine)]
    if not machines or not view.jobs:
        return {}
    if len(machines) == 1:
        curves = (view.curve(waiting.job, machines[0]) for waiting in view.jobs)
        return {machines[0]: [waiting for waiting, curve in zip(view.jobs, curves) if curve]}
    dealt = _Deal(view, machines).pool_of
    return {
        machine: [waiting for waiting, pool in zip(view.jobs, dealt) if pool == number]
        for number, machine in enumerate(machines)
    }


class _Deal:
    """Which pool each job is in; -1 for none.

    A pool of k jobs on n devices is worth the sum of log rate(n / k). Rates between powers of two
    lie on a line in logarithms; below the fewest devices on which a job fits it takes turns.
    """

    def __init__(self, view: View, machines: list[str]) -> None:
        self._devices = np.array([view.nodes.total(machine) for machine in machines], dtype=float)
        top = int(math.log2(self._devices.max())) + 1
        self._log_rate = np.full((len(machines), len(view.jobs), top), _NEVER)
        for row, waiting in enumerate(view.jobs):
            for number, machine in enumerate(machines):
                self._fill(self._log_rate[number, row], view.curve(waiting.job, machine))
        self.pool_of = np.full(len(view.jobs), -1)
        self._jobs_in = np.zeros(len(machines), dtype=int)
        number_of = {machine: number for number, machine in enumerate(machines)}
        fits = self._log_rate[:, :, -1] > _NEVER / 2
        for row, waiting in enumerate(view.jobs):
            held = number_of.get(waiting.grant.machine, -1) if waiting.grant else -1
            if held >= 0 and fits[held, row]:
                self.pool_of[row] = held
                self._jobs_in[held] += 1
        for row in np.flatnonzero((self.pool_of < 0) & fits.any(axis=0)).tolist():
            self._join(row)
        for _ in range(len(view.jobs)):
            if not self._move():
                break

    def _fill(self, row: Array, curve: Mapping[int, float]) -> None:
        powers = [(n.bit_length() - 1, rate) for n, rate in curve.items() if n & (n - 1) == 0]
        powers = powers or [(int(math.log2(n)), rate) for n, rate in curve.items()]
        for power, rate in powers:
            row[power] = math.log(rate)
        if powers:
            first = powers[0][0]
            row[:first] = row[first] - math.log(2) * np.arange(first, 0, -1)
            # More devices than are fastest are left alone.
            np.maximum.accumulate(row, out=row)

    def _log_rates(self, pool: int, jobs: int) -> Array:
        """Each job's logarithm of the rate in a pool of so many jobs."""
        place = math.log2(self._devices[pool] / max(jobs, 1))
        rows = self._log_rate[pool]
        if place <= 0:
            return np.asarray(rows[:, 0] + place * math.log(2))
        low = min(int(place), rows.shape[1] - 1)
        high = min(low + 1, rows.shape[1] - 1)
        return np.asarray(rows[:, low] + (place - low) * (rows[:, high] - rows[:, low]))

    def _rates_near(self, pool: int) -> tuple[Array, Array, Array]:
        """Logarithms of rates with one job fewer, as it is, and with one more."""
        jobs = int(self._jobs_in[pool])
        fewer, now, more = (self._log_rates(pool, jobs + change) for change in (-1, 0, 1))
        return fewer, now, more

    def _join(self, row: int) -> None:
        gains = []
        for pool in range(len(self._devices)):
            members = self.pool_of == pool
            _, now, more = self._rates_near(pool)
            gains.append(more[members].sum() - now[members].sum() + more[row])
        best = int(np.argmax(gains))
        self.pool_of[row] = best
        self._jobs_in[best] += 1

    def _move(self) -> bool:
        """Make the move that gains most; whether any gains enough."""
        leaving = np.full(len(self.pool_of), -np.inf)
        joining = np.empty((len(self._devices), len(self.pool_of)))
        for pool in range(len(self._devices)):
            members = self.pool_of == pool
            fewer, now, more = self._rates_near(pool)
            worth = now[members].sum()
            leaving[members] = fewer[members].sum() - fewer[members] - worth
            joining[pool] = more[members].sum() + more - worth
            joining[pool, members] = -np.inf
        gains = leaving + joining
        pool, row = divmod(int(gains.argmax()), len(self.pool_of))
        if gains[pool, row] <= _MOVE_GAIN:
            return False
        self._jobs_in[self.pool_of[row]] -= 1
        self.pool_of[row] = pool
        self._jobs_in[pool] += 1
        return True


def with_spare_devices(grants: dict[str, Grant], view: View) -> dict[str, Grant]:
    """Grants of the pools, and devices that they leave, to waiting jobs and then to long ones."""
    free = {machine: view.nodes.total(machine) for machine in view.machines}
    for grant in grants.values():
        free[grant.machine] -= grant.count
    grants = dict(grants)
    waiting = [one for one in view.jobs if one.job.name not in grants]
    for one in waiting if any(free.values()) else ():
        choices = {
            (rate, machine, count)
            for machine in view.machines
            for count, rate in view.curve(one.job, machine).items()
            if count <= free[machine]
        }
        if choices:
            _, machine, count = max(choices)
            grants[one.job.name] = Grant(count, machine)
            free[machine] -= count
    if any(free.values()):
        _add_unlike_devices(grants, free, view)
    return grants


def _add_unlike_devices(grants: dict[str, Grant], free: dict[str, int], view: View) -> None:
    """Add free devices of other types to the longest jobs, where that is believed to pay."""
    left: list[tuple[float, Waiting]] = []
    for one in view.jobs:
        grant = grants.get(one.job.name)
        if grant is not None and grant.global_batch is None:
            rate = view.rate(one.job, grant.count, grant.machine)
            left.append((one.remaining_samples / rate, one))
    left.sort(key=lambda pair: -pair[0])
    for remaining_s, one in left[:_MOST_OFFERS]:
        grant = grants[one.job.name]
        if remaining_s < _SPARE_LEAST_S:
            break
        rate = view.rate(one.job, grant.count, grant.machine)
        best = rate * _SPARE_GAIN_RATIO, grant
        for machine, devices in free.items():
            most = min(devices, one.job.highest_count - grant.count)
            if machine != grant.machine and most > 0:
                count = 1 << (most.bit_length() - 1)
                mixed = Grant(grant.count, grant.machine, also=((machine, count),))
                best = max(best, (view.rate_of(one.job, mixed), mixed), key=lambda pair: pair[0])
        grants[one.job.name] = best[1]
        for machine, count in best[1].also:
            free[machine] -= count


def admitted(least: Mapping[str, int], free: int) -> dict[str, int]:
    """Jobs in their order with the fewest devices of each, those that there is room for."""
    given: dict[str, int] = {}
    for name, count in least.items():
        if count <= free:
            given[name] = count
            free -= count
    return given


def climbed(
    curves: Mapping[str, Curve], free: int, cost: Callable[[str, float, float], float]
) -> dict[str, int]:
    """Counts of jobs that start on their fewest devices, in order, while `free` devices last.

    Then they go up one by one to their next counts, the cheapest per device first, unless more
    devices bring nothing. `cost` is that of a job's step from one rate to a higher one.
    """

    def following(name: str, count: int) -> tuple[float, str, int] | None:
        curve = curves[name]
        higher = next((point for point in curve if point > count), None)
        if higher is None or curve[higher] <= curve[count]:
            return None
        return cost(name, curve[count], curve[higher]) / (higher - count), name, higher

    counts = admitted({name: next(iter(curve)) for name, curve in curves.items()}, free)
    free -= sum(counts.values())
    climbs = [climb for name, count in counts.items() if (climb := following(name, count))]
    heapq.heapify(climbs)
    while climbs and free:
        _, name, higher = heapq.heappop(climbs)
        if higher - counts[name] > free:
            continue
        free -= higher - counts[name]
        counts[name] = higher
        if climb := following(name, higher):
            heapq.heappush(climbs, climb)
    return counts


def _shortest_first(view: View) -> tuple[dict[str, Curve], dict[str, float]]:
    """Curves of jobs, by the time that they would take on their fewest devices; what they train."""
    remaining = {waiting.job.name: waiting.remaining_samples for waiting in view.jobs}
    curves = {waiting.job.name: view.curve(waiting.job) for waiting in view.jobs}
    line = sorted(curves, key=lambda name: remaining[name] / next(iter(curves[name].values())))
    return {name: curves[name] for name in line}, remaining


class MaxMin(Pools):
    """Counts rise together, none above the count that is believed fastest.

    Each job gets one device in the order of arrival; then those with the fewest go to their next
    count as long as there are devices. Of equals goes first whose next count is the most times as
    fast as one device: errors of two counts would add up in their ratio.
    """

    capped = True

    def share(self, view: View) -> dict[str, Grant]:
        """Max-min counts on one machine type."""
        free = view.nodes.total(view.machine)
        curves = {waiting.job.name: view.curve(waiting.job) for waiting in view.jobs}
        least = {name: next(iter(curve)) for name, curve in curves.items()}
        given = admitted(least, free)
        free -= sum(given.values())
        best = {name: max(curves[name], key=curves[name].__getitem__) for name in given}
        rising = list(given)
        while rising:
            level = min(given[name] for name in rising)
            gains: dict[str, tuple[float, int]] = {}
            for name in rising:
                curve = curves[name]
                higher = next((count for count in curve if count > level), None)
                if given[name] == level and higher and not (self.capped and higher > best[name]):
                    gains[name] = curve[higher] / curve[least[name]], higher
            for name in sorted(gains, key=lambda name: -gains[name][0]):
                higher = gains[name][1]
                if higher - level <= free:
                    free -= higher - level
                    given[name] = higher
            rising = [name for name in rising if given[name] > level]
        return {name: Grant(count, view.machine) for name, count in given.items()}


class UncappedMaxMin(MaxMin):
    """Counts rise as long as there are devices, whatever they are believed to gain."""

    capped = False


class Afs(Pools):
    """AFS-L: devices are handed out step by step, from a job's count to its next.

    Of a shorter job s and a longer l (by remaining time at the current share) l gets it iff
    (X_l(n') − X_l(n)) / X_l(n') > (X_s(n') − X_s(n)) / X_s(n), gains per device. Jobs without
    devices come first, the shortest first. Hwang et al., "Elastic Resource Sharing for Distributed
    Deep Learning" (NSDI 2021), section 4.
    """

    def share(self, view: View) -> dict[str, Grant]:
        """Counts on one machine type."""
        curves, remaining = _shortest_first(view)
        free = view.nodes.total(view.machine)
        given = admitted({name: next(iter(curve)) for name, curve in curves.items()}, free)
        free -= sum(given.values())
        climbs = _Climbs([curves[name] for name in given], [remaining[name] for name in given])
        while (chosen := climbs.chosen(free)) is not None:
            free -= climbs.rise(chosen)
        return {name: Grant(n, view.machine) for name, n in zip(given, climbs.counts, strict=True)}


class _Climbs:
    """Jobs on their way up their curves, with the terms of the rule for the next step of each.

    The terms of all jobs are arrays: the rule is asked for every step of thousands of jobs.
    """

    def __init__(self, curves: list[Curve], remaining: list[float]) -> None:
        self._steps = [list(curve.items()) for curve in curves]
        self._remaining = remaining
        self._at = [0] * len(curves)
        self._remaining_s = np.zeros(len(curves))
        self._gain_as_shorter = np.zeros(len(curves))
        self._gain_as_longer = np.zeros(len(curves))
        self._needed = np.zeros(len(curves))
        for number in range(len(curves)):
            self._look_up(number)

    @property
    def counts(self) -> list[int]:
        """The count that each job has reached."""
        return [steps[at][0] for steps, at in zip(self._steps, self._at, strict=True)]

    def chosen(self, free: int) -> int | None:
        """Who takes the next step by the rule, of those whose step fits and brings something."""
        open_s = np.where(self._needed <= free, self._remaining_s, np.inf)
        chosen: int | None = None
        while len(open_s):
            shortest = int(open_s.argmin())
            if open_s[shortest] == np.inf:
                break
            chosen = shortest
            # Longer jobs that gain more than the chosen one; the shortest of them is asked next.
            stays = (open_s > open_s[chosen]) & (
                self._gain_as_longer > self._gain_as_shorter[chosen]
            )
            open_s = np.where(stays, open_s, np.inf)
        return chosen

    def rise(self, number: int) -> int:
        """Take a job to its next count; the devices that this takes."""
        needed = int(self._needed[number])
        self._at[number] += 1
        self._look_up(number)
        return needed

    def _look_up(self, number: int) -> None:
        steps, at = self._steps[number], self._at[number]
        count, rate = steps[at]
        self._remaining_s[number] = self._remaining[number] / rate
        # What slows a job down, and the top of its curve, end its climb.
        self._needed[number] = np.inf
        if at + 1 < len(steps) and steps[at + 1][1] > rate:
            higher, faster = steps[at + 1]
            self._needed[number] = higher - count
            gain = (faster - rate) / (higher - count)
            self._gain_as_shorter[number] = gain / rate
            self._gain_as_longer[number] = gain / faster


class Optimus(Pools):
    """One device each, shortest first; then the largest (remaining time now − with more) / devices.

    The dominant resource of a worker is its device; the paper's scheduling interval, section 6.1.
    Peng et al., "Optimus" (EuroSys 2018), section 4.1.
    """

    interval_s = 600.0

    def share(self, view: View) -> dict[str, Grant]:
        """Counts on one machine type."""
        curves, remaining = _shortest_first(view)

        def cost(name: str, rate: float, faster: float) -> float:
            return remaining[name] / faster - remaining[name] / rate

        given = climbed(curves, view.nodes.total(view.machine), cost)
        return {name: Grant(count, view.machine) for name, count in given.items()}
