"""Lay out what can be rented, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from estimator.cli.render import facts, grid, stacked
from estimator.units import format_interval, format_seconds

if TYPE_CHECKING:
    from estimator.advise.choices import Choice
    from estimator.advise.offers import Offer

_MOST_NAMED = 4


def plan_report(choice: Choice, model: str, *, spot: bool) -> Group:
    """The cheapest and the fastest, then all that no other beats in both time and cost."""
    if choice.cheapest is None or choice.fastest is None:
        nearest = min(choice.offers, key=lambda each: (each.usd, each.duration_s))
        quickest = min(choice.offers, key=lambda each: (each.duration_s, each.usd))
        return stacked(
            facts(
                [
                    ("answer", "nothing keeps the deadline and the budget"),
                    ("cheapest of all", _said(nearest)),
                    ("fastest of all", _said(quickest)),
                ]
            )
        )
    rows = [("cheapest", _said(choice.cheapest))]
    rows += _alike("as cheap", choice.as_cheap)
    rows.append(("fastest", _said(choice.fastest)))
    rows += _alike("as fast", choice.as_fast)
    table = grid(
        f"Training {model}, at {'spot' if spot else 'on-demand'} prices",
        *("allocation", "strategy", "batch", "micro-batches", "time", "USD", "USD/h"),
        numbers=5,
    )
    for each in choice.front:
        table.add_row(
            each.allocation,
            each.strategy,
            f"{each.batch_per_gpu}",
            f"{each.accumulation_steps}",
            _interval(each),
            f"{each.usd:,.2f}",
            f"{each.usd_per_hour:,.2f}",
        )
    notes = [f"of {len(choice.offers)} allocations, those that no other beats in time and cost"]
    if any(each.fits == "uncertain" for each in choice.front):
        unsure = ", ".join(e.allocation for e in choice.front if e.fits == "uncertain")
        notes.append(f"may not fit into memory: {unsure}")
    if len({each.global_batch for each in choice.front}) > 1:
        notes.append("global batches differ, and with them how many samples are needed")
    return stacked(facts(rows), table, Text("; ".join(notes)))


def _said(offer: Offer) -> str:
    checkpoints = ""
    if offer.interval_s is not None:
        checkpoints = f", a checkpoint every {format_seconds(offer.interval_s)}"
    cost = f"{offer.usd:,.2f} USD, {_interval(offer)}"
    return f"{offer.allocation}: {cost}, {offer.strategy}{checkpoints}"


def _interval(offer: Offer) -> str:
    return format_interval(offer.duration_s, offer.low_s, offer.high_s)


def _alike(name: str, offers: Sequence[Offer]) -> list[tuple[str, str]]:
    """Offers that cannot be told apart from the best, by name."""
    if not offers:
        return []
    named = ", ".join(each.allocation for each in offers[:_MOST_NAMED])
    more = f" and {len(offers) - _MOST_NAMED} more" if len(offers) > _MOST_NAMED else ""
    return [(name, f"cannot be told apart: {named}{more}")]
