"""Rank the strategies of gradient synchronisation and parameter update by step time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from estimator.errors import EstimatorError, ProfileError, StrategyError
from estimator.estimates.engine import DEFAULT
from estimator.estimates.estimate import Estimate
from estimator.estimates.request import EstimateRequest, Options
from estimator.graph.ir.op_graph import OpGraph
from estimator.placement.allocation import Allocation
from estimator.workload import Strategy
from estimator.workload.strategies import SEARCHED


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRow:
    """One strategy on one allocation: its estimate, or why there is none."""

    allocation: str
    strategy: Strategy
    answer: Estimate | None
    refusal: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in base units."""
        row: dict[str, Any] = {
            "allocation": self.allocation,
            "strategy": str(self.strategy),
            "refusal": self.refusal or None,
        }
        if self.answer is not None:
            names = ("step_time_s", "low_s", "high_s", "samples_per_s", "peak_memory_bytes")
            row |= {name: getattr(self.answer, name) for name in (*names, "fits")}
            row |= self.answer.bottleneck_dict()
        return row


def rank_strategies(
    allocation: str,
    strategies: Sequence[str | Strategy],
    answer_of: Callable[[Strategy], Estimate],
) -> list[StrategyRow]:
    """The strategies by step time; those that do not fit come later, those without answer last.

    Raises StrategyError where no strategy is given, the error of the first one if none can be
    answered.
    """
    if not strategies:
        raise StrategyError("there is no strategy to choose from; name some, such as ddp and ps:1")
    rows: list[StrategyRow] = []
    errors: list[EstimatorError] = []
    for strategy in map(Strategy.parse, strategies):
        try:
            answer = answer_of(strategy)
            rows.append(StrategyRow(allocation=allocation, strategy=strategy, answer=answer))
        except (ProfileError, StrategyError) as error:
            # The profile lacks what it needs, or it cannot divide the ranks: go on with the others.
            errors.append(error)
            rows.append(
                StrategyRow(
                    allocation=allocation, strategy=strategy, answer=None, refusal=str(error)
                )
            )
    if len(errors) == len(rows):
        raise errors[0]
    return sorted(rows, key=_sort_key)


def _sort_key(row: StrategyRow) -> tuple[int, float]:
    if row.answer is None:
        return 2, 0.0
    return int(row.answer.fits == "no"), row.answer.step_time_s


def best_strategy(
    graph: OpGraph,
    allocation: str | Allocation,
    strategies: Sequence[str | Strategy] = SEARCHED,
    **options: Unpack[Options],
) -> list[StrategyRow]:
    """Estimates of `graph` under each strategy, the best first; options as of `estimate`.

    Servers of ``ps:N`` are taken to be nodes of their own beside the allocation. Raises
    EstimatorError where nothing can be answered.
    """
    where = options.get("cluster"), options.get("profile")
    placement = DEFAULT.place(allocation, cluster=where[0], profile=where[1])
    request = EstimateRequest.of(graph, placement, **options)
    return rank_strategies(
        str(placement.allocation),
        strategies,
        lambda strategy: DEFAULT.estimate(request.changed(strategy=strategy)),
    )
