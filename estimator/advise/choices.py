"""Choose among offers: the cheapest within a time, the fastest within a budget, all between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from estimator.advise.offers import Offer, allocations_of, offers
from estimator.errors import WorkloadError, quoted
from estimator.graph.op_graph import OpGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Offers that keep a deadline and a budget, by what is wanted of them.

    `front` has those that no other beats in both time and cost, the fastest first; `cheapest` and
    `fastest` are its ends, None where no offer keeps both. `as_cheap` and `as_fast` cannot be told
    apart from them: their intervals meet. `left_out` says of allocations that cannot train why.
    """

    offers: tuple[Offer, ...]
    front: tuple[Offer, ...]
    cheapest: Offer | None
    fastest: Offer | None
    as_cheap: tuple[Offer, ...]
    as_fast: tuple[Offer, ...]
    left_out: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in base units."""
        return {
            "cheapest": self.cheapest.to_dict() if self.cheapest else None,
            "fastest": self.fastest.to_dict() if self.fastest else None,
            "as_cheap": [each.allocation for each in self.as_cheap],
            "as_fast": [each.allocation for each in self.as_fast],
            "front": [each.to_dict() for each in self.front],
            "offers": [each.to_dict() for each in self.offers],
            "left_out": dict(self.left_out),
        }


def choose(
    offered: Sequence[Offer],
    *,
    deadline_s: float | None = None,
    budget_usd: float | None = None,
    left_out: Mapping[str, str] = MappingProxyType({}),
) -> Choice:
    """Sort out offers by time and cost; raises WorkloadError for a bound that is none."""
    for name, bound in (("deadline_s", deadline_s), ("budget_usd", budget_usd)):
        if bound is not None and not bound >= 0:
            raise WorkloadError(f"{name} is {bound:g}; give a number from 0 on, or none")
    kept = [
        each
        for each in offered
        if (deadline_s is None or each.duration_s <= deadline_s)
        and (budget_usd is None or each.usd <= budget_usd)
    ]
    front = pareto_front(kept)
    fastest, cheapest = (front[0], front[-1]) if front else (None, None)
    return Choice(
        offers=tuple(offered),
        front=tuple(front),
        cheapest=cheapest,
        fastest=fastest,
        as_cheap=tuple(
            each
            for each in kept
            if cheapest and each is not cheapest and each.low_usd <= cheapest.high_usd
        ),
        as_fast=tuple(
            each
            for each in kept
            if fastest and each is not fastest and each.low_s <= fastest.high_s
        ),
        left_out=left_out,
    )


def pareto_front(offered: Sequence[Offer]) -> list[Offer]:
    """What no other offer beats in both time and cost, the fastest first; of equals, one."""
    front: list[Offer] = []
    for each in sorted(offered, key=lambda each: (each.duration_s, each.usd)):
        if not front or each.usd < front[-1].usd:
            front.append(each)
    return front


def cheapest(
    graph: OpGraph,
    machines: Sequence[str],
    *,
    max_nodes: int = 8,
    mixed: bool = False,
    deadline_s: float | None = None,
    budget_usd: float | None = None,
    **asked: Any,
) -> Choice:
    """What to rent to train a graph: `choose` among `offers` on some machine types.

    `asked` goes to `offers`: `samples` or `tokens`, `prices`, `spot`, `revocations`, `strategies`,
    `batch_per_gpu` or `global_batch`, `layouts_of`, `calibration`, `executor`. With `mixed` nodes
    of two machines may train together. Raises PriceError, WorkloadError, AllocationError.
    """
    if isinstance(machines, str):
        raise WorkloadError(f"machines are the text {quoted(machines)}; give a list of names")
    if not machines:
        raise WorkloadError("no machine was given; name at least one")
    allocations = list(allocations_of(machines, max_nodes, mixed=mixed))
    found = offers(graph, allocations, **asked)
    return choose(
        found.offers, deadline_s=deadline_s, budget_usd=budget_usd, left_out=found.left_out
    )
