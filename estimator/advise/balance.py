"""Split a global batch over unlike devices so that no rank waits, and say what that gains.

A step lasts as long as its slowest lane, and a lane's time is nearly a line in its batch. So each
round draws the lines through the batches estimated so far, finds the whole batches that level them,
and estimates that split, until a split comes up again; then samples move off the slowest group one
exchange at a time for as long as that shortens the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from estimator.coefficients import Calibration
from estimator.engine import DEFAULT, estimate_graph
from estimator.errors import WorkloadError
from estimator.estimates import NOT_FIT_MARGIN_RATIO, Estimate
from estimator.graph.op_graph import OpGraph
from estimator.machines.profile import MachineProfile
from estimator.placement.allocation import Allocation
from estimator.placement.placement import Placement
from estimator.placement.topology import Cluster
from estimator.workload import Strategy

Array = NDArray[np.float64]
Split = tuple[int, ...]

_MOST_ROUNDS = 8
_MOST_EXCHANGES = 16
# A sum of such powers is least where the largest term is: what levels lanes with one table of sums.
_POWER = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The best split found of a global batch, and the even one to compare with.

    Where the global batch is no multiple of the ranks, `even` has the next larger batch on every
    rank, as torch's DistributedSampler pads.
    """

    answer: Estimate
    even: Estimate

    @property
    def gain_ratio(self) -> float:
        """Throughput gained over the even split: 0.25 is a quarter more."""
        return self.even.step_time_s / self.answer.step_time_s - 1


def balance(
    graph: OpGraph,
    allocation: str | Allocation | Placement,
    *,
    global_batch: int,
    accumulation_steps: int = 1,
    strategy: str | Strategy = "ddp",
    cluster: Cluster | None = None,
    calibration: Calibration | None = None,
    profile: MachineProfile | None = None,
) -> Balance:
    """The split of `global_batch` over the groups of an allocation with the shortest step.

    All ranks of a group get the same batch; name nodes one by one to let theirs differ. On equal
    devices it is the even split. Splits that fit into memory go before those that do not. Raises
    WorkloadError where no rank may stay without a sample, and what `estimate_graph` raises.
    """
    placement = DEFAULT.place(allocation, cluster=cluster, profile=profile)
    parsed = Strategy.parse(strategy)

    def answer_of(split: Split | None) -> Estimate:
        return estimate_graph(
            graph,
            placement,
            batch_per_gpu=split,
            global_batch=global_batch if split is None else None,
            accumulation_steps=accumulation_steps,
            strategy=parsed,
            cluster=cluster,
            calibration=calibration,
            profile=profile,
        )

    if not placement.is_mixed or accumulation_steps < 1:
        even = answer_of(None)
        return Balance(answer=even, even=even)
    ranks = tuple(group.ranks for group in placement.allocation.groups)
    needed = sum(ranks) * accumulation_steps
    if global_batch < needed:
        raise WorkloadError(
            f"global batch {global_batch} leaves ranks without a sample; {sum(ranks)} ranks and "
            f"{accumulation_steps} accumulation steps need at least {needed}"
        )
    search = _Search(answer_of, ranks, global_batch // accumulation_steps)
    best = search.best() if global_batch % accumulation_steps == 0 else None
    if best is None:
        raise WorkloadError(
            f"global batch {global_batch} cannot be split into whole batches for groups of "
            f"{' + '.join(map(str, ranks))} ranks and {accumulation_steps} accumulation steps; "
            f"use a multiple of {needed}"
        )
    return Balance(answer=best, even=search.even)


@dataclass(frozen=True, slots=True)
class Line:
    """A quantity of a group against its batch."""

    at_zero: float
    per_sample: float

    @classmethod
    def through(cls, known: Mapping[int, float], near: int) -> Line:
        """The line through the two known batches nearest to `near`; of one, through 0 as well."""
        first, *others = sorted(known, key=lambda batch: abs(batch - near))
        other, value = (others[0], known[others[0]]) if others else (0, 0.0)
        slope = max((known[first] - value) / (first - other), 1e-12)
        return cls(known[first] - slope * first, slope)


class _Search:
    """Estimates splits of `total` samples over groups of some ranks, each split once."""

    def __init__(self, answer_of: Callable[[Split], Estimate], ranks: Split, total: int) -> None:
        self._answer_of, self._ranks, self._total = answer_of, ranks, total
        self._starts = np.cumsum((0, *ranks[:-1]))
        self._answers: dict[Split, Estimate] = {}
        self._lanes_s: list[dict[int, float]] = [{} for _ in ranks]
        self._memory_ratios: list[dict[int, float]] = [{} for _ in ranks]
        even = -(-total // sum(ranks))
        self.even = self._answer((even,) * len(ranks))

    def best(self) -> Estimate | None:
        """The best estimate of a split that adds up to the total; None if there is no such."""
        near = next(iter(self._answers))
        for _ in range(_MOST_ROUNDS):
            split = self._levelled(near)
            if split is None or split in self._answers:
                break
            self._answer(split)
            near = split
        whole = [each for each in self._answers if self._sum(each) == self._total]
        if not whole:
            return None
        return self._answers[self._exchanged(min(whole, key=self._cost))]

    def _sum(self, split: Split) -> int:
        return sum(ranks * batch for ranks, batch in zip(self._ranks, split, strict=True))

    def _cost(self, split: Split) -> tuple[bool, float]:
        answer = self._answer(split)
        return answer.fits == "no", answer.step_time_s

    def _answer(self, split: Split) -> Estimate:
        if split not in self._answers:
            answer = self._answers[split] = self._answer_of(split)
            for group, (lane_s, memory_ratio) in enumerate(self._loads(answer)):
                self._lanes_s[group][split[group]] = lane_s
                self._memory_ratios[group][split[group]] = memory_ratio
        return self._answers[split]

    def _loads(self, answer: Estimate) -> list[tuple[float, float]]:
        """(lane's seconds, share of memory) of the slowest and the fullest rank of each group."""
        lane_s, memory_ratio = np.zeros(answer.ranks), np.zeros(answer.ranks)
        for each in answer.plan.classes:
            members = list(each.ranks)
            device = each.program.profile.devices[0]
            program, shards = each.program, answer.plan.shards
            needed = program.memory.total_bytes(shards)
            alone_s = program.lane_s + program.sharded_lane_s / shards
            lane_s[members] = alone_s * each.slowdown_ratio
            memory_ratio[members] = needed / device.memory_bytes
        loads = (np.maximum.reduceat(values, self._starts) for values in (lane_s, memory_ratio))
        return list(zip(*(values.tolist() for values in loads), strict=True))

    def _levelled(self, near: Split) -> Split | None:
        """The split that levels the lines through what is known; in memory, if any fits."""
        lines = [Line.through(*each) for each in zip(self._lanes_s, near, strict=True)]
        most = np.array(
            [
                self._most(known, batch)
                for known, batch in zip(self._memory_ratios, near, strict=True)
            ]
        )
        unlimited = np.full(len(lines), float(self._total))
        return levelled(lines, self._ranks, self._total, most) or levelled(
            lines, self._ranks, self._total, unlimited
        )

    def _most(self, memory_ratios: Mapping[int, float], near: int) -> float:
        """The largest batch with which a group's memory does not overflow."""
        line = Line.through(memory_ratios, near)
        room_ratio = 1 + NOT_FIT_MARGIN_RATIO - line.at_zero
        return max(min(room_ratio / line.per_sample, float(self._total)), 1.0)

    def _exchanged(self, split: Split) -> Split:
        """Move samples off the group with the longest lane while that shortens the step."""
        for _ in range(_MOST_EXCHANGES):
            lanes_s = [known[batch] for known, batch in zip(self._lanes_s, split, strict=True)]
            slowest = lanes_s.index(max(lanes_s))
            moves = [
                moved
                for other in range(len(split))
                if other != slowest and (moved := self._moved(split, slowest, other))
            ]
            better = min(moves, key=self._cost, default=split)
            if self._cost(better) >= self._cost(split):
                break
            split = better
        return split

    def _moved(self, split: Split, giver: int, taker: int) -> Split | None:
        """As few samples as can move from one group to another; None if ranks would have none."""
        gives, takes = self._ranks[giver], self._ranks[taker]
        shared = math.gcd(gives, takes)
        moved = list(split)
        moved[giver] -= takes // shared
        moved[taker] += gives // shared
        return tuple(moved) if moved[giver] >= 1 else None


def levelled(lines: Sequence[Line], ranks: Split, total: int, most: Array) -> Split | None:
    """Whole batches of at least 1 and at most `most` that sum to `total`, with level lines.

    Of the whole batches near the real ones it takes those with the least sum of high powers of
    their lines, by one table of partial sums. None where none of them adds up.
    """
    at_zero = np.array([line.at_zero for line in lines])
    per_sample = np.array([line.per_sample for line in lines])
    counts = np.array(ranks)
    if counts @ np.floor(most) < total:
        return None
    real = _level_batches(at_zero, per_sample, counts, total, most)
    level = float((at_zero + per_sample * real).max())
    low = np.maximum(np.floor(real).astype(int) - max(ranks), 1)
    left = total - int(counts @ low)
    if left < 0:
        return None
    costs = np.full(left + 1, np.inf)
    costs[0] = 0.0
    choices: list[NDArray[np.intp]] = []
    for group, count in enumerate(ranks):
        following, chosen = np.full(left + 1, np.inf), np.zeros(left + 1, dtype=np.intp)
        reach = min(2 * max(ranks) + 1, int(most[group]) - int(low[group]))
        for more in range(min(reach, left // count) + 1):
            time = at_zero[group] + per_sample[group] * (low[group] + more)
            # Capped, so that its power stays finite.
            ratio = min(max(time / level, 0.0), 1e3)
            cost = costs[: left + 1 - more * count] + count * ratio**_POWER
            part, picks = following[more * count :], chosen[more * count :]
            better = cost < part
            part[better], picks[better] = cost[better], more
        costs = following
        choices.append(chosen)
    if not np.isfinite(costs[left]):
        return None
    split = low.tolist()
    for group in reversed(range(len(ranks))):
        more = int(choices[group][left])
        split[group] += more
        left -= more * ranks[group]
    return tuple(split)


def _level_batches(
    at_zero: Array, per_sample: Array, counts: NDArray[np.int_], total: int, most: Array
) -> Array:
    """Batches, not whole, that sum to `total` and whose lines are level within their bounds."""

    def batches(level: float) -> Array:
        return np.asarray(np.clip((level - at_zero) / per_sample, 1.0, most))

    low, high = 0.0, float((at_zero + per_sample * most).max())
    for _ in range(100):
        level = (low + high) / 2
        low, high = (level, high) if counts @ batches(level) < total else (low, level)
    return batches(high)
