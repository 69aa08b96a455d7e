"""Lay out what can be rented, layouts, replays and stalls for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from estimator.cli.render.answers import facts, grid, listed, stacked
from estimator.placement.allocation import Allocation
from estimator.units import (
    format_bytes,
    format_count,
    format_error,
    format_interval,
    format_ratio,
    format_seconds,
)
from estimator.waits.measured import STALLS, MeasuredStalls, RunName
from estimator.waits.predicted import InputAnswers, PredictedStalls, Stall

if TYPE_CHECKING:
    from estimator.advise.layouts.search import LayoutRanking
    from estimator.advise.rent.offers import Choice, Offer
    from estimator.replay.replay import Outcome


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


def replay_report(cluster: str, outcomes: Mapping[str, Outcome]) -> Group:
    """One row a policy; times in hours, × against the first policy."""
    first = next(iter(outcomes.values()))
    table = grid(
        f"{first.jobs} jobs on {cluster}, times in hours",
        *("policy", "JCT", "×", "median", "90 %", "99 %", "makespan", "×"),
        *("used", "queue", "ρ", "restarts"),
        numbers=11,
    )
    for name, each in outcomes.items():
        table.add_row(
            name,
            _hours(each.average_jct_s),
            f"{first.average_jct_s / each.average_jct_s:.2f}",
            *map(_hours, (each.median_jct_s, each.p90_jct_s, each.p99_jct_s, each.makespan_s)),
            f"{first.makespan_s / each.makespan_s:.2f}",
            format_ratio(each.utilization_ratio),
            _hours(each.average_queue_s),
            f"{each.average_fairness:.2f} ≤ {each.worst_unfairness:.1f}",
            f"{each.restarts_per_job:.1f}",
        )
    notes = (
        "× is against the first policy; ρ is finish-time fairness, mean and worst: completion time "
        "over that alone on an equal share of the cluster"
    )
    return Group(table, Text(notes))


def _hours(seconds: float) -> str:
    return f"{max(seconds, 0.0) / 3600:.2f}"


def predicted_report(found: PredictedStalls, data: InputAnswers | None = None) -> Group:
    """The steps of one device, one node and all nodes: what each takes beyond the one before."""
    batch = "" if found.batch_per_gpu is None else f", batch {found.batch_per_gpu} per device"
    table = grid(
        f"{found.model} on {found.allocation}{batch}: predicted stalls",
        "devices",
        "stall",
        "step",
        "waits",
        "between",
        "of its step",
        "of a node's step",
        numbers=5,
    )
    for devices, name, stall, step_s in (
        (found.one_device, "host", found.host, found.device_s),
        (found.one_node, "interconnect", found.interconnect, found.node_s),
        (found.allocation, "network", found.network, found.step_s),
    ):
        if stall is not None:
            table.add_row(devices, name, format_seconds(step_s), *_cells(name, stall, step_s))
    if data is None:
        return stacked(table, Text(_in_words(found)))
    return stacked(table, Text(_in_words(found)), _input_table(data), Text(_input_words(data)))


def _input_table(data: InputAnswers) -> Table:
    table = grid(
        "with its loader", "loader", "samples/s", "waits for data", "least of G, P, F", numbers=3
    )
    for each in (data.as_it_is, *data.changes):
        table.add_row(
            each.change,
            format_count(each.samples_per_s).strip(),
            format_seconds(each.input_stall_s),
            format_count(each.baseline_samples_per_s).strip(),
        )
    return table


def _input_words(data: InputAnswers) -> str:
    said = [f"Without loading: {format_count(data.without_samples_per_s).strip()} samples/s."]
    if data.workers_needed is None:
        said.append("No number of workers would hide the loading.")
    else:
        said.append(f"{data.workers_needed} workers would hide what workers can hide.")
    if data.cached_needed is not None:
        said.append(f"{format_ratio(data.cached_needed)} cached is as good as all of it.")
    return " ".join(said)


# Stalls whose ratio is of a node's step, whatever the step that they lengthen.
_OF_A_NODE = ("interconnect", "network")


def _cells(name: str, stall: Stall, step_s: float) -> tuple[str, str, str, str]:
    """What a stall takes, as a share of the step that it lengthens and of that of one node."""
    between = f"{format_seconds(stall.low_s)} to {format_seconds(stall.high_s)}"
    of_node = format_ratio(stall.ratio) if name in _OF_A_NODE else ""
    return format_seconds(stall.stall_s), between, format_ratio(stall.stall_s / step_s), of_node


def _in_words(found: PredictedStalls) -> str:
    if found.interconnect is None and found.network is None:
        return "One device waits for no other."
    said = []
    if found.interconnect is not None:
        slower = format_ratio(found.interconnect.ratio)
        said.append(f"{slower} of a node's step is waiting for its devices")
    if found.network is not None:
        said.append(f"the network makes the step {found.step_s / found.node_s:.3g} times as long")
    return "; ".join(said) + "."


_RUNS: dict[RunName, str] = {
    "T0": "synthetic batches, one device",
    "T1": "synthetic batches, all devices",
    "T3": "real batches, warm page cache",
    "T2": "real batches, cold page cache",
    "T5": "synthetic batches, two nodes",
}


def measured_report(found: MeasuredStalls) -> Group:
    """What each run took, the stalls that their differences are, and why some are not known."""
    devices = "1 device" if found.devices == 1 else f"{found.devices} devices"
    runs = grid(f"{found.script} on {devices}: measured", "run", "", "step", "noise", numbers=2)
    for name, meaning in _RUNS.items():
        if name in found.runs:
            run = found.runs[name]
            noise = format_error(run.noise_s / run.step_s)
            runs.add_row(name, meaning, format_seconds(run.step_s), noise)
    columns = ("stall", "", "waits", "between", "of its step", "of a node's step")
    table = grid("what a step waits for", *columns, numbers=4)
    for stall, (longer, shorter, _) in STALLS.items():
        if stall in found.stalls:
            cells = _cells(stall, found.stalls[stall], found.runs[longer].step_s)
            table.add_row(stall, f"{longer} - {shorter}", *cells)
    if "host" in found.stalls:
        alone_s = found.runs["T0" if "T0" in found.runs else "T1"].step_s
        cells = _cells("host", found.stalls["host"], alone_s)
        table.add_row("host", "one device - its work", *cells)
    why = [f"{name}: {reason}" for name, reason in found.missing.items()]
    loader = f"{found.workers} workers" if found.workers else "no workers"
    waiting = (
        f"The loader has {loader}; the script waits {format_seconds(found.waited_s)} a step for it."
    )
    rates = [f"{name} {format_count(rate).strip()}" for name, rate in found.rates.items()]
    waiting += f" In samples/s: {', '.join(rates)}."
    return stacked(runs, table, Text(waiting), listed("not measured", why))
