"""Describe what can be rented, layouts, replays and stalls as sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from estimator.placement.allocation import Allocation
from estimator.report.sections import Section, Table
from estimator.units import (
    format_bytes,
    format_count,
    format_error,
    format_interval,
    format_ratio,
    format_seconds,
)

if TYPE_CHECKING:
    from estimator.advise.layouts.search import LayoutRanking
    from estimator.advise.rank_order import RankOrder
    from estimator.advise.rent.offers import Choice, Offer
    from estimator.replay.replay import Outcome
    from estimator.waits.measured import MeasuredStalls, RunName
    from estimator.waits.predicted import InputAnswers, PredictedStalls, Stall


_MOST_NAMED = 4


def rent_sections(choice: Choice, model: str, *, spot: bool) -> list[Section]:
    """The cheapest and the fastest, then all that no other beats in both time and cost."""
    left_out = Section("left out", items=_left_out(choice))
    if not choice.offers:
        return [Section(facts=[("answer", f"no allocation can train {model}")]), left_out]
    if choice.cheapest is None or choice.fastest is None:
        nearest = min(choice.offers, key=lambda offer: (offer.usd, offer.duration_s))
        quickest = min(choice.offers, key=lambda offer: (offer.duration_s, offer.usd))
        facts = [
            ("answer", "nothing keeps the deadline and the budget"),
            ("cheapest of all", _in_words(nearest)),
            ("fastest of all", _in_words(quickest)),
        ]
        return [Section(facts=facts), left_out]
    facts = [
        ("cheapest", _in_words(choice.cheapest)),
        *_alike("as cheap", choice.as_cheap),
        ("fastest", _in_words(choice.fastest)),
        *_alike("as fast", choice.as_fast),
    ]
    rows = [
        (
            f"{offer.allocation}\n  {_how(offer)}",
            *(f"{offer.batch_per_gpu or 'by speed'}", f"{offer.accumulation_steps}"),
            *(_interval(offer), f"{offer.usd:,.2f}", f"{offer.usd_per_hour:,.2f}"),
        )
        for offer in choice.front
    ]
    notes = [f"of {len(choice.offers)} allocations, those that no other beats in time and cost"]
    if unsure := [offer.allocation for offer in choice.front if offer.fits == "uncertain"]:
        notes.append(f"may not fit into memory: {', '.join(unsure)}")
    if len({offer.global_batch for offer in choice.front}) > 1:
        notes.append("global batches differ, and with them how many samples are needed")
    notes += choice.assumptions
    columns = ("allocation, layout, strategy", "batch", "micro-batches", "time", "USD", "USD/h")
    return [
        Section(facts=facts),
        Section(
            f"Training {model}, at {'spot' if spot else 'on-demand'} prices",
            table=Table(columns, rows, numbers=5),
            sentences=["; ".join(notes)],
        ),
        left_out,
    ]


def _left_out(choice: Choice) -> list[str]:
    """Why allocations cannot train: one line for a machine of which none can."""
    offered = {_machines(offer.allocation) for offer in choice.offers}
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


def _in_words(offer: Offer) -> str:
    checkpoints = ""
    if offer.interval_s is not None:
        checkpoints = f", a checkpoint every {format_seconds(offer.interval_s)}"
    cost = f"{offer.usd:,.2f} USD, {_interval(offer)}"
    return f"{offer.allocation}: {cost}, {_how(offer)}{checkpoints}"


def _how(offer: Offer) -> str:
    checkpoint = f"checkpoint {offer.checkpoint}" if offer.checkpoint else ""
    parts = (offer.layout or "data parallel", checkpoint, offer.strategy)
    return ", ".join(filter(None, parts))


def _interval(offer: Offer) -> str:
    return format_interval(offer.duration_s, offer.low_s, offer.high_s)


def _alike(name: str, offers: Sequence[Offer]) -> list[tuple[str, str]]:
    """Offers that cannot be told apart from the best, by name."""
    if not offers:
        return []
    named = ", ".join(offer.allocation for offer in offers[:_MOST_NAMED])
    more = f" and {len(offers) - _MOST_NAMED} more" if len(offers) > _MOST_NAMED else ""
    return [(name, f"cannot be told apart: {named}{more}")]


def order_sections(order: RankOrder, size: str) -> list[Section]:
    """The hosts in rank order, and what that gains."""
    gain = (
        f"{format_seconds(order.ring_s)} for an all-reduce of {size} by {order.algorithm}, "
        f"{order.given_s / order.ring_s:.2f} times as fast as in the order given "
        f"({format_seconds(order.given_s)})"
    )
    return [Section(facts=[("order", gain)], sentences=[" ".join(order.hosts)])]


def layouts_sections(
    ranking: LayoutRanking, *, model: str, allocation: str, global_batch: int
) -> list[Section]:
    """The layouts that fit, the fastest first, and why the others are slower."""
    best = ranking.rows[0].answer
    rows = []
    for row in ranking.rows:
        answer = row.answer
        slower = format_ratio(answer.step_time_s / best.step_time_s - 1)
        rows.append(
            (
                f"{row.layout}\n  {row.strategy}{f', {row.checkpoint}' if row.checkpoint else ''}",
                *(row.why, f"{row.micro_batches} × {row.batch_per_gpu}"),
                f"{format_bytes(answer.peak_memory_bytes)}{' ?' * (answer.fits == 'uncertain')}",
                format_interval(answer.step_time_s, answer.low_s, answer.high_s),
                "" if answer is best else f"{slower}{' ~' if row.like_best else ''}",
            )
        )
    slower_by_bound = ranking.candidates - ranking.too_large - ranking.worked_out
    notes = [
        f"of {ranking.candidates:,} layouts {ranking.too_large} surely do not fit, "
        f"{ranking.worked_out} were worked out, {slower_by_bound} are slower than these by their "
        "bounds"
    ]
    if ranking.left_out:
        notes.append(f"left out are {', '.join(ranking.left_out)}")
    if any(row.like_best for row in ranking.rows):
        notes.append("~ cannot be told apart from the first, by what both are not off together")
    if any(row.answer.fits == "uncertain" for row in ranking.rows):
        notes.append("? may not fit into memory")
    columns = ("most by", "micro-batches", "memory", "step", "slower by")
    table = Table(("layout, strategy, checkpoint", *columns), rows, numbers=4)
    return [
        Section(facts=[("best", ranking.rows[0].layout), ("bottleneck", best.bottleneck)]),
        Section(
            f"Training {model} on {allocation} with a global batch of {global_batch}",
            table=table,
            sentences=["; ".join(notes)],
        ),
    ]


def replay_section(cluster: str, outcomes: Mapping[str, Outcome]) -> Section:
    """One row a policy; times in hours, × against the first policy."""
    first = next(iter(outcomes.values()))
    rows = [
        (
            *(name, _hours(outcome.average_jct_s)),
            f"{first.average_jct_s / outcome.average_jct_s:.2f}",
            *map(_hours, (outcome.median_jct_s, outcome.p90_jct_s, outcome.p99_jct_s)),
            *(_hours(outcome.makespan_s), f"{first.makespan_s / outcome.makespan_s:.2f}"),
            *(format_ratio(outcome.utilization_ratio), _hours(outcome.average_queue_s)),
            f"{outcome.average_fairness:.2f} ≤ {outcome.worst_unfairness:.1f}",
            f"{outcome.restarts_per_job:.1f}",
        )
        for name, outcome in outcomes.items()
    ]
    columns = (
        *("policy", "JCT", "×", "median", "90 %", "99 %", "makespan", "×"),
        *("used", "queue", "ρ", "restarts"),
    )
    note = (
        "× is against the first policy; ρ is finish-time fairness, mean and worst: completion time "
        "over that alone on an equal share of the cluster"
    )
    title = f"{first.jobs} jobs on {cluster}, times in hours"
    return Section(title, table=Table(columns, rows, numbers=11), sentences=[note])


def _hours(seconds: float) -> str:
    return f"{max(seconds, 0.0) / 3600:.2f}"


def predicted_sections(
    predicted: PredictedStalls, data: InputAnswers | None = None
) -> list[Section]:
    """The steps of one device, one node and all nodes: what each takes beyond the one before."""
    batch = "" if predicted.batch_per_gpu is None else f", batch {predicted.batch_per_gpu}"
    batch = batch and f"{batch} per device"
    rows = [
        (devices, name, format_seconds(step_s), *_cells(name, stall, step_s))
        for devices, name, stall, step_s in (
            (predicted.one_device, "host", predicted.host, predicted.device_s),
            (predicted.one_node, "interconnect", predicted.interconnect, predicted.node_s),
            (predicted.allocation, "network", predicted.network, predicted.step_s),
        )
        if stall is not None
    ]
    columns = ("devices", "stall", "step", "waits", "between", "of its step", "of a node's step")
    title = f"{predicted.model} on {predicted.allocation}{batch}: predicted stalls"
    summary = [_stalls_in_words(predicted)]
    section = Section(title, table=Table(columns, rows, numbers=5), sentences=summary)
    return [section] if data is None else [section, _input_section(data)]


def _input_section(data: InputAnswers) -> Section:
    rows = [
        (
            *(change.change, format_count(change.samples_per_s).strip()),
            format_seconds(change.input_stall_s),
            format_count(change.baseline_samples_per_s).strip(),
        )
        for change in (data.as_it_is, *data.changes)
    ]
    words = [f"Without loading: {format_count(data.without_samples_per_s).strip()} samples/s."]
    if data.workers_needed is None:
        words.append("No number of workers would hide the loading.")
    else:
        words.append(f"{data.workers_needed} workers would hide what workers can hide.")
    if data.cached_needed is not None:
        words.append(f"{format_ratio(data.cached_needed)} cached is as good as all of it.")
    columns = ("loader", "samples/s", "waits for data", "least of G, P, F")
    table = Table(columns, rows, numbers=3)
    return Section("with its loader", table=table, sentences=[" ".join(words)])


# Stalls whose ratio is of a node's step, whatever the step that they lengthen.
_OF_A_NODE = ("interconnect", "network")


def _cells(name: str, stall: Stall, step_s: float) -> tuple[str, str, str, str]:
    """What a stall takes, as a share of the step that it lengthens and of that of one node."""
    between = f"{format_seconds(stall.low_s)} to {format_seconds(stall.high_s)}"
    of_node = format_ratio(stall.ratio) if name in _OF_A_NODE else ""
    return format_seconds(stall.stall_s), between, format_ratio(stall.stall_s / step_s), of_node


def _stalls_in_words(predicted: PredictedStalls) -> str:
    clauses = []
    if predicted.interconnect is not None:
        slower = format_ratio(predicted.interconnect.ratio)
        clauses.append(f"{slower} of a node's step is waiting for its devices")
    if predicted.network is not None:
        factor = f"{predicted.step_s / predicted.node_s:.3g}"
        clauses.append(f"the network makes the step {factor} times as long")
    return f"{'; '.join(clauses) or 'One device waits for no other'}."


_RUNS: dict[RunName, str] = {
    "T0": "synthetic batches, one device",
    "T1": "synthetic batches, all devices",
    "T3": "real batches, warm page cache",
    "T2": "real batches, cold page cache",
    "T5": "synthetic batches, two nodes",
}


def measured_sections(measured: MeasuredStalls) -> list[Section]:
    """What each run took, the stalls that their differences are, and why some are not known."""
    from estimator.waits.measured import STALLS

    devices = "1 device" if measured.devices == 1 else f"{measured.devices} devices"
    runs = [
        (name, meaning, format_seconds(run.step_s), format_error(run.noise_s / run.step_s))
        for name, meaning in _RUNS.items()
        if (run := measured.runs.get(name)) is not None
    ]
    stalls = [
        (name, f"{longer} - {shorter}", *_cells(name, stall, measured.runs[longer].step_s))
        for name, (longer, shorter, _) in STALLS.items()
        if (stall := measured.stalls.get(name)) is not None
    ]
    if "host" in measured.stalls:
        alone_s = measured.runs["T0" if "T0" in measured.runs else "T1"].step_s
        cells = _cells("host", measured.stalls["host"], alone_s)
        stalls.append(("host", "one device - its work", *cells))
    loader = f"{measured.workers} workers" if measured.workers else "no workers"
    waited = format_seconds(measured.waited_s)
    rates = [f"{name} {format_count(rate).strip()}" for name, rate in measured.rates.items()]
    waiting = (
        f"The loader has {loader}; the script waits {waited} a step for it. In samples/s: "
        f"{', '.join(rates)}."
    )
    columns = ("stall", "", "waits", "between", "of its step", "of a node's step")
    return [
        Section(
            f"{measured.script} on {devices}: measured",
            table=Table(("run", "", "step", "noise"), runs, numbers=2),
        ),
        Section(
            "what a step waits for", table=Table(columns, stalls, numbers=4), sentences=[waiting]
        ),
        Section("not measured", items=[f"{name}: {why}" for name, why in measured.missing.items()]),
    ]
