"""Lay out what can be rented, and layouts, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from estimator.cli.render import facts, grid, listed, stacked
from estimator.placement.allocation import Allocation
from estimator.units import (
    format_bytes,
    format_interval,
    format_ratio,
    format_seconds,
)

if TYPE_CHECKING:
    from estimator.advise.choices import Choice
    from estimator.advise.layouts import LayoutRanking
    from estimator.advise.offers import Offer

_MOST_NAMED = 4


def plan_report(choice: Choice, model: str, *, spot: bool) -> Group:
    """The cheapest and the fastest, then all that no other beats in both time and cost."""
    left_out = listed("left out", _left_out(choice))
    if not choice.offers:
        return stacked(facts([("answer", f"no allocation can train {model}")]), left_out)
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
            ),
            left_out,
        )
    rows = [("cheapest", _said(choice.cheapest))]
    rows += _alike("as cheap", choice.as_cheap)
    rows.append(("fastest", _said(choice.fastest)))
    rows += _alike("as fast", choice.as_fast)
    table = grid(
        f"Training {model}, at {'spot' if spot else 'on-demand'} prices",
        *("allocation", "layout", "strategy", "batch", "micro-batches", "time", "USD", "USD/h"),
        numbers=5,
    )
    for each in choice.front:
        table.add_row(
            each.allocation,
            _laid_out(each),
            each.strategy,
            f"{each.batch_per_gpu or 'by speed'}",
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
    return stacked(facts(rows), table, Text("; ".join(notes)), left_out)


def _left_out(choice: Choice) -> list[str]:
    """Why allocations cannot train: one line for a machine of which none can."""
    offered = {_machines(each.allocation) for each in choice.offers}
    by_machine: dict[str, list[str]] = {}
    for allocation in choice.left_out:
        by_machine.setdefault(_machines(allocation), []).append(allocation)
    lines = []
    for machine, names in by_machine.items():
        if machine in offered:
            lines += [f"{name}: {choice.left_out[name]}" for name in names]
        else:
            lines.append(f"{machine}: not even {names[-1]}: {choice.left_out[names[-1]]}")
    return lines


def _machines(allocation: str) -> str:
    groups = Allocation.parse(allocation).groups
    return " with ".join(dict.fromkeys(group.machine or group.host or "" for group in groups))


def layouts_report(
    ranking: LayoutRanking, *, model: str, allocation: str, global_batch: int
) -> Group:
    """The layouts that fit, the fastest first, and why the others are slower."""
    table = grid(
        f"Training {model} on {allocation} with a global batch of {global_batch}",
        *("layout, strategy, checkpoint", "most by"),
        *("micro-batches", "memory", "step", "slower by"),
        numbers=4,
    )
    # A layout that is cut off tells nothing, and one on several lines cannot be copied.
    table.columns[0].no_wrap = True
    best = ranking.rows[0].answer
    for row in ranking.rows:
        answer = row.answer
        mark = " ?" if answer.fits == "uncertain" else ""
        slower = answer.step_time_s / best.step_time_s - 1
        table.add_row(
            f"{row.layout}\n  {row.strategy}{f', {row.checkpoint}' if row.checkpoint else ''}",
            row.why,
            f"{row.micro_batches} × {row.batch_per_gpu}",
            format_bytes(answer.peak_memory_bytes) + mark,
            format_interval(answer.step_time_s, answer.low_s, answer.high_s),
            "" if answer is best else f"{format_ratio(slower)}{' ~' if row.like_best else ''}",
        )
    out = ranking.candidates - ranking.too_large - ranking.worked_out
    notes = [
        f"of {ranking.candidates:,} layouts {ranking.too_large} surely do not "
        f"fit, {ranking.worked_out} were worked out, {out} are slower than these by their bounds"
    ]
    if any(row.like_best for row in ranking.rows):
        notes.append("~ cannot be told apart from the first, by what both are not off together")
    if any(row.answer.fits == "uncertain" for row in ranking.rows):
        notes.append("? may not fit into memory")
    rows = [("best", ranking.rows[0].layout), ("bottleneck", best.bottleneck)]
    return stacked(facts(rows), table, Text("; ".join(notes)))


def _said(offer: Offer) -> str:
    checkpoints = ""
    if offer.interval_s is not None:
        checkpoints = f", a checkpoint every {format_seconds(offer.interval_s)}"
    cost = f"{offer.usd:,.2f} USD, {_interval(offer)}"
    return f"{offer.allocation}: {cost}, {_laid_out(offer)}, {offer.strategy}{checkpoints}"


def _laid_out(offer: Offer) -> str:
    checkpoint = f"checkpoint {offer.checkpoint}" if offer.checkpoint else ""
    return ", ".join(filter(None, (offer.layout or "data parallel", checkpoint)))


def _interval(offer: Offer) -> str:
    return format_interval(offer.duration_s, offer.low_s, offer.high_s)


def _alike(name: str, offers: Sequence[Offer]) -> list[tuple[str, str]]:
    """Offers that cannot be told apart from the best, by name."""
    if not offers:
        return []
    named = ", ".join(each.allocation for each in offers[:_MOST_NAMED])
    more = f" and {len(offers) - _MOST_NAMED} more" if len(offers) > _MOST_NAMED else ""
    return [(name, f"cannot be told apart: {named}{more}")]
