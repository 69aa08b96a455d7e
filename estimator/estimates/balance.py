"""Balance the load of heterogeneous devices: split a global batch so that no rank waits.

A step takes as long as its slowest rank, whose time is nearly affine in its batch. Each iteration
therefore fits an affine model to the batches of each group estimated so far, equalises the models'
times by water-filling over whole batches, and estimates that split, until a split repeats. A local
search then moves samples off the slowest group while that shortens the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from estimator.elementwise import Array, Indices
from estimator.errors import WorkloadError
from estimator.estimates.engine import DEFAULT, Engine
from estimator.estimates.estimate import NOT_FIT_MARGIN_RATIO, Estimate
from estimator.estimates.request import EstimateRequest
from estimator.workload.strategies import MOST_GLOBAL_BATCH, check_count

Split = tuple[int, ...]

_MOST_ITERATIONS = 8
_MOST_MOVES = 16
# Exponent of the p-norm that stands for the maximum of the groups' times: being a sum of powers it
# can be minimised by dynamic programming.
_P = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The best split found of a global batch, and the even one to compare with.

    Where the global batch is no multiple of the ranks, `even` has the next larger batch on every
    rank, as torch's DistributedSampler pads.
    """

    answer: Estimate
    even: Estimate

    @property
    def is_uneven(self) -> bool:
        """Whether the batch was split by speed."""
        return self.answer is not self.even

    @property
    def gain_ratio(self) -> float:
        """Throughput gained over the even split: 0.25 is a quarter more."""
        return self.even.step_time_s / self.answer.step_time_s - 1


def balance(request: EstimateRequest, engine: Engine = DEFAULT) -> Balance:
    """The split of a request's global batch over the groups of unlike devices, shortest step first.

    All ranks of a group get the same batch, at most: a global batch that no such split adds up to
    is answered by the next larger one that does, unless `strict`. Name nodes one by one to let
    theirs differ. On equal devices, and where there is no such batch to split, both answers are
    the one of `Engine.estimate`. Splits that fit into memory go before those that do not. Raises
    WorkloadError where no rank may stay without a sample, and what `Engine.estimate` raises.
    """
    total, steps = request.global_batch, request.accumulation_steps
    if total is None or not request.layout.is_data_parallel:
        even = engine.estimate(request)
        return Balance(answer=even, even=even)
    placement = engine.place(request.allocation, cluster=request.cluster, profile=request.profile)
    request = replace(request, allocation=placement)
    if not placement.is_mixed:
        even = engine.estimate(request)
        return Balance(answer=even, even=even)

    def answer_of(split: Split) -> Estimate:
        return engine.estimate(replace(request, batch_per_gpu=split, global_batch=None))

    ranks = tuple(group.ranks for group in placement.allocation.groups)
    total = check_count(total, "global batch", most=MOST_GLOBAL_BATCH)
    needed = sum(ranks) * steps
    if total < needed:
        raise WorkloadError(
            f"global batch {total} leaves ranks without a sample; {sum(ranks)} ranks and "
            f"{steps} accumulation steps need at least {needed}"
        )
    unit, most = math.gcd(*ranks), -(-total // needed) * sum(ranks)
    for shared in range(-(-total // (steps * unit)) * unit, most + 1, unit):
        if request.strict and shared * steps != total:
            break
        search = _SplitSearch(answer_of, ranks, shared)
        best = search.best()
        if best is not None:
            return Balance(answer=_padded(best, total), even=search.even)
    raise WorkloadError(
        f"global batch {total} cannot be split into whole batches for groups of "
        f"{' + '.join(map(str, ranks))} ranks and {steps} accumulation steps; "
        f"use a multiple of {needed}"
    )


def _padded(answer: Estimate, total: int) -> Estimate:
    """An answer whose ranks have at most these batches, of fewer samples than they would be."""
    if answer.global_batch == total:
        return answer
    rate, tokens = total / answer.step_time_s, answer.request.graph.tokens_per_sample
    tokens_per_s = rate * tokens if tokens else None
    return replace(answer, global_batch=total, samples_per_s=rate, tokens_per_s=tokens_per_s)


@dataclass(frozen=True, slots=True)
class AffineModel:
    """An affine model of a quantity of a group: its value at batch 0, and per sample."""

    intercept: float
    slope: float

    @classmethod
    def through(cls, known: Mapping[int, float], near: int) -> AffineModel:
        """Through the two known batches nearest to `near`; with one known, through the origin."""
        first, *others = sorted(known, key=lambda batch: abs(batch - near))
        other, value = (others[0], known[others[0]]) if others else (0, 0.0)
        slope = max((known[first] - value) / (first - other), 1e-12)
        return cls(known[first] - slope * first, slope)


class _SplitSearch:
    """Searches the splits of `total` samples over groups of ranks; estimates each split once."""

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
        for _ in range(_MOST_ITERATIONS):
            split = self._equalised(near)
            if split is None or split in self._answers:
                break
            self._answer(split)
            near = split
        complete = [answer for answer in self._answers if self._sum(answer) == self._total]
        if not complete:
            return None
        return self._answers[self._local_search(min(complete, key=self._cost))]

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
        shards = answer.plan.shards
        for kind, ranks in answer.plan.ranks_by_kind.items():
            lane_s[ranks] = kind.lane.length_s(shards)
            needed_bytes = kind.program.memory.total_bytes(shards)
            memory_ratio[ranks] = needed_bytes / kind.device.usable_bytes
        loads = (np.maximum.reduceat(values, self._starts) for values in (lane_s, memory_ratio))
        return list(zip(*(values.tolist() for values in loads), strict=True))

    def _equalised(self, near: Split) -> Split | None:
        """The split that equalises the affine models' times; one that fits into memory, if any."""
        models = [AffineModel.through(*pair) for pair in zip(self._lanes_s, near, strict=True)]
        most = np.array(
            [
                self._most(known, batch)
                for known, batch in zip(self._memory_ratios, near, strict=True)
            ]
        )
        unlimited = np.full(len(models), float(self._total))
        return equalised(models, self._ranks, self._total, most) or equalised(
            models, self._ranks, self._total, unlimited
        )

    def _most(self, memory_ratios: Mapping[int, float], near: int) -> float:
        """The largest batch that fits into the memory of a group."""
        model = AffineModel.through(memory_ratios, near)
        free_ratio = 1 + NOT_FIT_MARGIN_RATIO - model.intercept
        return max(min(free_ratio / model.slope, float(self._total)), 1.0)

    def _local_search(self, split: Split) -> Split:
        """Steepest descent: move samples off the slowest group while that shortens the step."""
        for _ in range(_MOST_MOVES):
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

    def _moved(self, split: Split, donor: int, receiver: int) -> Split | None:
        """The smallest move of samples between two groups; None if a rank would have none left."""
        donors, receivers = self._ranks[donor], self._ranks[receiver]
        divisor = math.gcd(donors, receivers)
        moved = list(split)
        moved[donor] -= receivers // divisor
        moved[receiver] += donors // divisor
        return tuple(moved) if moved[donor] >= 1 else None


def equalised(models: Sequence[AffineModel], ranks: Split, total: int, most: Array) -> Split | None:
    """Whole batches of at least 1 and at most `most` that sum to `total` and equalise the times.

    Of the whole batches near the fractional optimum it takes those with the least p-norm of the
    models' times, by dynamic programming over the groups. None where none of them adds up.
    """
    intercepts = np.array([model.intercept for model in models])
    slopes = np.array([model.slope for model in models])
    counts = np.array(ranks)
    if counts @ np.floor(most) < total:
        return None
    fractional = _water_filling(intercepts, slopes, counts, total, most)
    level_s = float((intercepts + slopes * fractional).max())
    low = np.maximum(np.floor(fractional).astype(int) - max(ranks), 1)
    left = total - int(counts @ low)
    if left < 0:
        return None
    costs = np.full(left + 1, np.inf)
    costs[0] = 0.0
    choices: list[Indices] = []
    for group, count in enumerate(ranks):
        following, chosen = np.full(left + 1, np.inf), np.zeros(left + 1, dtype=np.intp)
        extent = min(2 * max(ranks) + 1, int(most[group]) - int(low[group]))
        for more in range(min(extent, left // count) + 1):
            time_s = intercepts[group] + slopes[group] * (low[group] + more)
            # Capped, so that its power stays finite.
            ratio = min(max(time_s / level_s, 0.0), 1e3)
            cost = costs[: left + 1 - more * count] + count * ratio**_P
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


def _water_filling(
    intercepts: Array, slopes: Array, counts: NDArray[np.int_], total: int, most: Array
) -> Array:
    """Fractional batches that sum to `total` and equalise the times within their bounds."""

    def batches(level_s: float) -> Array:
        return np.asarray(np.clip((level_s - intercepts) / slopes, 1.0, most))

    low, high = 0.0, float((intercepts + slopes * most).max())
    for _ in range(100):
        level_s = (low + high) / 2
        low, high = (level_s, high) if counts @ batches(level_s) < total else (low, level_s)
    return batches(high)
