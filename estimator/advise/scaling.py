"""Compute how training scales: against one device, over sweeps of allocations and of batches.

A sweep estimates allocations, batches or strategies one by one; one without an answer keeps its
reason.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from estimator.errors import (
    AllocationError,
    EstimatorError,
    ProfileError,
    StrategyError,
    WorkloadError,
    quoted,
)
from estimator.estimates.engine import DEFAULT
from estimator.estimates.estimate import Estimate
from estimator.estimates.table.table import map_shared
from estimator.placement.allocation import Allocation
from estimator.placement.columns import AllocationGrid
from estimator.placement.topology import Cluster
from estimator.timeline.plan import answer_of, at_link_rate
from estimator.units import parse_whole
from estimator.workload.strategies import MOST_BATCH, Strategy

# The usual target when a network is sized (Goyal et al. 2017 report about 90 %).
WANTED_EFFICIENCY_RATIO = 0.9
_FASTEST_FACTOR = 2.0**40
# The rate found is within this ratio of the one that is needed.
_CLOSE_RATIO = 1.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Efficiency of an allocation against one device of its slowest kind, and its slowest link.

    `against` is that device, as an allocation of its own, calibrated like the answer itself.
    100 % is a step without communication or waiting: see `linear_step_s` for a sharded update.
    `needed_bytes_per_s` is the payload rate of `link` from which the efficiency would reach
    `wanted_ratio`; None where no rate would do, or nothing is sent between nodes.
    """

    efficiency_ratio: float
    against: str
    wanted_ratio: float
    link: str
    link_bytes_per_s: float | None
    needed_bytes_per_s: float | None


def scaling_of(
    answer: Estimate, *, wanted_ratio: float = WANTED_EFFICIENCY_RATIO
) -> Scaling | None:
    """The scaling of an estimate, at its batch per device and accumulation.

    None for one rank, and for ranks that share layers, which none of them can hold alone.
    """
    if answer.ranks == 1 or answer.layout is not None:
        return None
    request = answer.request
    singles = [
        DEFAULT.estimate(
            request.changed(
                allocation=single,
                batch_per_gpu=batch,
                global_batch=None,
                # A single device holds all shards.
                strategy=request.strategy.sharded_over(None),
                profile=None if named else answer.plan.kinds[0].program.profile,
            )
        )
        for single, batch, named in _single_devices(answer, request.cluster)
    ]
    linear_s, against = max(
        (linear_step_s(single, share=answer.plan.share), str(single.allocation))
        for single in singles
    )
    group = answer.plan.slowest_group
    across = group.nodes > 1
    return Scaling(
        efficiency_ratio=linear_s / answer.step_time_s,
        against=against,
        wanted_ratio=wanted_ratio,
        link=group.link,
        link_bytes_per_s=group.bytes_per_s if across else None,
        needed_bytes_per_s=_needed_bytes_per_s(answer, linear_s / wanted_ratio) if across else None,
    )


def linear_step_s(smaller: Estimate, *, share: float) -> float:
    """Seconds of a smaller allocation's step of which each rank does a `share` of the update.

    Where the update is sharded, a single device updates all parameters: compared with its whole
    step, sharded training would seem to scale superlinearly.
    """
    return float(answer_of(smaller.plan._replace(share=share)).parts.total_s)


def _single_devices(
    answer: Estimate, cluster: Cluster | None
) -> list[tuple[Allocation, int | None, bool]]:
    """One device of each group, its batch, and whether its machine must be looked up by name."""
    groups = answer.allocation.groups
    batches = answer.batches or (None,) * len(groups)
    kinds = {
        (group.machine or group.host, batch): group
        for group, batch in zip(groups, batches, strict=True)
    }
    several = len({name for name, _ in kinds}) > 1
    return [
        (
            Allocation((replace(group, nodes=1, devices_per_node=1, devices=group.devices[:1]),)),
            batch,
            cluster is not None or several,
        )
        for (_, batch), group in kinds.items()
    ]


def _needed_bytes_per_s(answer: Estimate, step_s: float) -> float | None:
    """The rate of the slowest link at which the step takes `step_s`, by bisection."""
    rate = answer.plan.slowest_group.bytes_per_s

    def is_reached(factor: float) -> bool:
        return float(answer_of(at_link_rate(answer.plan, factor)).parts.total_s) <= step_s

    if not is_reached(_FASTEST_FACTOR):
        return None
    low, high = 1.0 / _FASTEST_FACTOR, _FASTEST_FACTOR
    while high / low > _CLOSE_RATIO:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if is_reached(middle) else (middle, high)
    return float(rate * high)


_MOST_ROWS = 100_000
_REFUSALS = (AllocationError, StrategyError, WorkloadError)
_STEP = ("step_time_s", "low_s", "high_s", "samples_per_s")
_MEMORY = ("peak_memory_bytes", "fits")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One allocation, at one of several strategies or batches: its estimate, or why there is none.

    `efficiency_ratio` is throughput per rank over that of the sweep's smallest allocation, with the
    share of the update that the ranks of this one have (`linear_step_s`). `batch` is per
    device; `is_largest` marks the largest one of the sweep's range that surely fits.
    """

    allocation: str
    answer: Estimate | None
    refusal: str = ""
    efficiency_ratio: float | None = None
    strategy: Strategy | None = None
    batch: int | None = None
    is_largest: bool = False

    @classmethod
    def of(cls, allocation: str, answer: Estimate | EstimatorError, **question: Any) -> SweepRow:
        """The row of an estimate, or of the error instead of one."""
        if isinstance(answer, EstimatorError):
            return cls(allocation=allocation, answer=None, refusal=str(answer), **question)
        return cls(allocation=allocation, answer=answer, **question)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in base units."""
        row: dict[str, Any] = {"allocation": self.allocation}
        names: tuple[str, ...] = ("ranks", *_STEP, "efficiency_ratio", *_MEMORY)
        if self.strategy is not None:
            row["strategy"], names = str(self.strategy), (*_STEP, *_MEMORY)
            row["merged_on"] = self.strategy.merged_on
            row["updated_on"] = self.strategy.updated_on
            if self.answer is not None:
                row["communication_exposed_s"] = self.answer.breakdown.communication_exposed_s
        if self.batch is not None:
            row["batch_per_gpu"], names = self.batch, ("global_batch", *_STEP, *_MEMORY)
        row["refusal"] = self.refusal or None
        if self.batch is not None:
            row["is_largest"] = self.is_largest
        if self.answer is not None:
            own = {"efficiency_ratio": self.efficiency_ratio}
            row |= {n: own[n] if n in own else getattr(self.answer, n) for n in names}
            row |= self.answer.bottleneck_dict()
        return row


def _tried(
    answer_of: Callable[[], Estimate], refusals: tuple[type[EstimatorError], ...] = _REFUSALS
) -> Estimate | EstimatorError:
    try:
        return answer_of()
    except refusals as error:
        return error


def _check_answered(answers: Sequence[Estimate | EstimatorError]) -> None:
    """Raise the first reason where there are only reasons."""
    errors = [answer for answer in answers if isinstance(answer, EstimatorError)]
    if errors and len(errors) == len(answers):
        raise errors[0]


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
    texts = (text for pattern in patterns for text in expand_pattern(pattern))
    rows = [
        (text, *answer)
        for text, answer in map_shared(executor, _answer_and_share, answer_of, texts)
    ]
    if not rows:
        raise AllocationError("the sweep names no allocation")
    _check_answered([answer for _, answer, _ in rows])
    answers = [answer for _, answer, _ in rows if isinstance(answer, Estimate)]
    smallest = min(answers, key=lambda answer: answer.ranks)
    if executor is not None:
        # What comes from a worker has no plan of its operators.
        smallest = answer_of(str(smallest.allocation))
    return [
        SweepRow.of(text, answer, efficiency_ratio=_efficiency(answer, smallest, share))
        for text, answer, share in rows
    ]


def _answer_and_share(
    answer_of: Callable[[str], Estimate], _kept: dict[str, Any], text: str
) -> tuple[Estimate | EstimatorError, float]:
    """The estimate of an allocation and the share of the update of a rank, or why there is none."""
    answer = _tried(partial(answer_of, text))
    return answer, answer.plan.share if isinstance(answer, Estimate) else 1.0


def _efficiency(
    answer: Estimate | EstimatorError, smallest: Estimate, share: float
) -> float | None:
    if isinstance(answer, EstimatorError) or not (answer.samples_per_s and smallest.samples_per_s):
        return None
    ratio = (answer.samples_per_s / answer.ranks) / (smallest.samples_per_s / smallest.ranks)
    return ratio * (linear_step_s(smallest, share=share) / smallest.step_time_s)


PLACES = "places"


def merging_places(allocation: str) -> list[Strategy]:
    """One strategy for each place to merge gradients and to update: devices, hosts, servers.

    BytePS adds up within a node first, wherever it merges then; there are as many servers
    elsewhere as nodes of workers.
    """
    nodes = sum(group.nodes for group in Allocation.parse(allocation).groups)
    texts = "ddp", "ps:beside,local,sum", "ps:beside,local", f"ps:{nodes},local,sum"
    return [Strategy.parse(text) for text in (*texts, f"ps:{nodes},local")]


def rank_strategies(
    allocation: str,
    strategies: Sequence[str | Strategy],
    answer_of: Callable[[Strategy], Estimate],
) -> list[SweepRow]:
    """The strategies by step time; those that do not fit come later, those without answer last.

    ``places`` stands for those of `merging_places`. Raises StrategyError where no strategy is
    given, the error of the first one if none can be answered.
    """
    if not strategies:
        raise StrategyError("there is no strategy to choose from; name some, such as ddp and ps:1")
    parsed = [
        strategy
        for text in strategies
        for strategy in (merging_places(allocation) if text == PLACES else [Strategy.parse(text)])
    ]
    # Where the profile lacks what one needs, or it cannot divide the ranks, there are the others.
    refusals = (ProfileError, StrategyError)
    answers = [_tried(partial(answer_of, strategy), refusals) for strategy in parsed]
    _check_answered(answers)
    rows = [
        SweepRow.of(allocation, answer, strategy=strategy)
        for strategy, answer in zip(parsed, answers, strict=True)
    ]

    def order(row: SweepRow) -> tuple[int, float]:
        return (int(row.answer.fits == "no"), row.answer.step_time_s) if row.answer else (2, 0.0)

    return sorted(rows, key=order)


def read_batches(text: str) -> tuple[int, ...]:
    """The batches of ``1..64``, doubled up to the last, or of a list; raises AllocationError.

    >>> read_batches("6..40"), read_batches("8,3")
    ((6, 12, 24, 40), (3, 8))
    """
    low_text, dots, high_text = text.partition("..")
    try:
        if not dots:
            batches = (parse_whole(part.strip(), most=MOST_BATCH) for part in text.split(","))
            return tuple(sorted(set(batches)))
        low = parse_whole(low_text.strip(), least=1, most=MOST_BATCH)
        high = parse_whole(high_text.strip(), least=low, most=MOST_BATCH)
    except ValueError as error:
        raise AllocationError(
            f"{quoted(text)} are no batches ({error}); write one, or such as 1..64 or 8,12,16"
        ) from None
    doubled = [low]
    while doubled[-1] < high:
        doubled.append(min(2 * doubled[-1], high))
    return tuple(doubled)


def sweep_batches(
    allocations: Sequence[str], batches: Sequence[int], answer_of: Callable[[str, int], Estimate]
) -> list[SweepRow]:
    """Every allocation at every batch, and at the largest between the first and last that fits.

    Raises the first reason if none can be answered.
    """
    rows: list[SweepRow] = []
    every: list[Estimate | EstimatorError] = []
    for allocation in allocations:
        by_batch = {batch: _tried(partial(answer_of, allocation, batch)) for batch in batches}
        every += by_batch.values()
        answers = {
            batch: answer for batch, answer in by_batch.items() if isinstance(answer, Estimate)
        }
        largest = _largest_that_fits(answers, allocation, answer_of)
        rows += [
            SweepRow.of(allocation, answer, batch=batch)
            for batch, answer in by_batch.items()
            if batch not in answers
        ]
        rows += [
            SweepRow.of(allocation, answer, batch=batch, is_largest=batch == largest)
            for batch, answer in sorted(answers.items())
        ]
    _check_answered(every)
    return rows


def _largest_that_fits(
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


def sweep_csv(rows: Sequence[SweepRow]) -> str:
    """The rows as comma-separated values in base units, with a heading.

    Objects in a row are columns, such as bottleneck_part.
    """
    tables = []
    for row in rows:
        table: dict[str, Any] = {}
        for name, value in row.to_dict().items():
            if isinstance(value, dict):
                table |= {f"{name}_{part}": cell for part, cell in value.items()}
            else:
                table[name] = value
        tables.append(table)
    text = io.StringIO()
    writer = csv.DictWriter(text, max(tables, key=len), lineterminator="\n")
    writer.writeheader()
    writer.writerows(tables)
    return text.getvalue()
