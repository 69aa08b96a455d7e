"""Compute the scaling efficiency of a job, over a whole pattern of allocations if asked."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

from estimator.errors import (
    AllocationError,
    EstimatorError,
    StrategyError,
    WorkloadError,
    quoted,
)
from estimator.estimates.engine import DEFAULT
from estimator.estimates.estimate import Estimate
from estimator.estimates.table.chunks import map_shared
from estimator.placement.allocation import Allocation, DeviceGroup
from estimator.placement.columns import AllocationGrid
from estimator.placement.topology import Cluster
from estimator.timeline.plan import answer_of, at_link_rate

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
                profile=None if named else answer.plan.ranks_by_kind[0].program.profile,
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
            Allocation(
                (
                    DeviceGroup(
                        nodes=1,
                        devices_per_node=1,
                        machine=group.machine,
                        host=group.host,
                        devices=group.devices[:1],
                    ),
                )
            ),
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
