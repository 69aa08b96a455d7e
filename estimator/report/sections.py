"""Gather what a report says of an estimate, section by section: words, tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from estimator.advise.memory import memory_of
from estimator.advise.rent.billing import hourly_usd, paid_usd
from estimator.advise.scaling import Scaling, SweepRow
from estimator.calibrate.calibrator import FittedStep
from estimator.errors import EstimatorError, PriceError
from estimator.estimates.estimate import Estimate
from estimator.machines.prices import PriceList
from estimator.placement.allocation import Allocation
from estimator.report.facts import FITS_WORDS, answer_facts, format_interval, part_name
from estimator.report.pictures import (
    Track,
    memory_figure,
    scaling_figure,
    timeline_figure,
    tracks_of,
)
from estimator.units import (
    format_bytes,
    format_count,
    format_error,
    format_ratio,
    format_seconds,
)
from estimator.workload.strategies import SEARCHED

_MOST_TENSORS = 10
# Costs are compared per so many samples where nobody says how many there are.
_SAMPLES = 1e6


class Share(NamedTuple):
    """A part of the step, drawn as a bar."""

    name: str
    ratio: float
    seconds: str
    share: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells as people read them; the last `numbers` columns are figures."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading with what stands below it; `figure` is one of matplotlib."""

    name: str
    title: str
    sentences: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    shares: tuple[Share, ...] = ()
    tracks: tuple[Track, ...] = ()
    step_s: float = 0.0
    table: Table | None = None
    figure: Any = None


def answer_section(
    answer: Estimate, *, scaling: Scaling | None = None, duration_s: float | None = None
) -> Section:
    """What is asked first: how long a step takes, whether it fits, what holds it back."""
    facts = answer_facts(answer, scaling=scaling, duration_s=duration_s)
    return Section(name="answer", title="Answer", facts=tuple(facts))


def breakdown_section(answer: Estimate) -> Section:
    """Where the time of the step goes; the parts add up to it."""
    parts = [(item.name, getattr(answer.breakdown, item.name)) for item in fields(answer.breakdown)]
    shares = tuple(
        Share(part_name(name), ratio, format_seconds(seconds), format_ratio(ratio))
        for name, seconds in parts
        if (ratio := seconds / answer.step_time_s) > 0
    )
    return Section(name="time", title="Where the time goes", shares=shares)


def timeline_section(answer: Estimate) -> Section:
    """What each lane does when."""
    timeline = answer.timeline
    return Section(
        name="timeline",
        title="Timeline of the step",
        tracks=tuple(tracks_of(timeline)),
        step_s=timeline.step_time_s,
        figure=timeline_figure(timeline),
    )


def scaling_section(rows: Sequence[SweepRow]) -> Section:
    """How it scales from one device to the allocation."""
    found = tuple(
        (
            row.allocation,
            str(row.answer.ranks),
            format_interval(row.answer),
            _rate(row.answer),
            "" if row.efficiency_ratio is None else format_ratio(row.efficiency_ratio),
        )
        for row in rows
        if row.answer is not None
    )
    has_rates = any(row.answer and row.answer.samples_per_s for row in rows)
    return Section(
        name="scaling",
        title="Scaling",
        table=Table(
            columns=("allocation", "ranks", "step", "samples/s", "of linear"),
            rows=found,
            numbers=4,
        ),
        figure=scaling_figure(rows) if has_rates else None,
    )


def memory_section(answer: Estimate) -> Section:
    """What the fullest device holds over the step, and what of it is largest at the peak."""
    title = "Memory over the step"
    if answer.layout is not None:
        words = f"Peak of {format_bytes(answer.peak_memory_bytes)}; its course is not drawn for "
        return Section(name="memory", title=title, sentences=(f"{words}layouts.",))
    try:
        report = memory_of(answer)
    except EstimatorError as error:
        return Section(name="memory", title=title, sentences=(str(error),))
    rows = tuple(
        (tensor.op or tensor.kind, tensor.module, format_bytes(tensor.size_bytes))
        for tensor in report.tensors[:_MOST_TENSORS]
    )
    return Section(
        name="memory",
        title=title,
        sentences=(f"The largest tensors at the peak, in {report.peak_op}:",),
        table=Table(columns=("tensor", "of", "bytes"), rows=rows, numbers=1),
        figure=memory_figure(report),
    )


def layouts_section(answer: Estimate, answer_as: Callable[[str, str | None], Estimate]) -> Section:
    """Other strategies and layouts on the same devices; `answer_as` takes both texts."""
    per_node = max(group.devices_per_node for group in answer.allocation.groups)
    powers = [1 << power for power in range(1, per_node.bit_length())]
    asked: list[tuple[str, str | None]] = [(answer.strategy, answer.layout)]
    asked += [(strategy, None) for strategy in SEARCHED]
    asked += [("ddp", f"tp={tp},dp=*") for tp in powers]
    found, refused = [], []
    for strategy, layout in dict.fromkeys(asked):
        named = f"{layout}, {strategy}" if layout else strategy
        try:
            found.append((named, answer_as(strategy, layout)))
        except EstimatorError as error:
            refused.append(f"{named}: {error}")
    # What does not fit comes last.
    found.sort(key=lambda each: (each[1].fits == "no", -(each[1].samples_per_s or 0.0)))
    rows = tuple(
        (
            named,
            FITS_WORDS[each.fits],
            format_interval(each),
            _rate(each),
            format_bytes(each.peak_memory_bytes),
        )
        for named, each in found
    )
    columns = ("layout", "memory", "step", "samples/s", "peak")
    return Section(
        name="layouts",
        title="Layouts",
        sentences=tuple(refused),
        table=Table(columns=columns, rows=rows, numbers=3),
    )


def cost_section(
    rows: Sequence[SweepRow], prices: PriceList, *, samples: float | None = None
) -> Section:
    """What training costs on each allocation of a sweep, instances paid whole."""
    amount = samples or _SAMPLES
    cells: list[tuple[str, ...]] = []
    refusal = ""
    for row in rows:
        answer = row.answer
        if answer is None or not answer.samples_per_s:
            continue
        duration_s = amount / answer.samples_per_s
        try:
            usd_per_hour = hourly_usd(prices, answer.allocation)
            usd = paid_usd(prices, answer.allocation, duration_s)
        except PriceError as error:
            refusal = str(error)
            continue
        cells.append(
            (
                row.allocation,
                FITS_WORDS[answer.fits],
                f"{usd_per_hour:.2f}",
                format_seconds(duration_s),
                f"{usd:.2f}",
            )
        )
    columns = ("allocation", "memory", "USD per hour", f"{format_count(amount)}samples", "USD")
    table = Table(columns=columns, rows=tuple(cells), numbers=3) if cells else None
    sentences = (
        (refusal,) if refusal else ("On-demand prices, whole instances, time as it is billed.",)
    )
    return Section(name="cost", title="Cost", sentences=sentences, table=table)


def calibration_section(steps: Sequence[FittedStep], store: str) -> Section:
    """Observed steps beside the engine's predictions and the calibrated ones."""
    rows = tuple(
        (
            step.allocation,
            str(step.batch_per_gpu),
            str(step.observations),
            format_seconds(step.observed_s),
            _beside(step.engine_s, step.observed_s),
            _beside(step.calibrated_s, step.observed_s),
        )
        for step in steps
    )
    columns = ("allocation", "batch", "seen", "observed", "engine", "calibrated")
    return Section(
        name="calibration",
        title="Predicted against observed",
        sentences=(f"Steps of this job in {store}.",),
        table=Table(columns=columns, rows=rows, numbers=5),
    )


def assumptions_section(answer: Estimate) -> Section:
    """What the answer takes for granted, and what each part of it is known by."""
    rows = tuple(
        (part, source, format_ratio(share), format_error(error))
        for part, source, share, error in answer.provenance
    )
    columns = ("part", "source", "share of time", "error")
    return Section(
        name="assumptions",
        title="Assumptions",
        sentences=answer.assumptions,
        table=Table(columns=columns, rows=rows, numbers=2),
    )


def smaller_allocations(allocation: Allocation) -> list[str]:
    """One device, then doubled up to a node, then nodes, up to the allocation itself.

    >>> smaller_allocations(Allocation.parse("3x4:t4-g4dn"))
    ['1x1:t4-g4dn', '1x2:t4-g4dn', '1x4:t4-g4dn', '2x4:t4-g4dn', '3x4:t4-g4dn']
    """
    if len(allocation.groups) > 1 or allocation.groups[0].machine is None:
        return [str(allocation)]
    (group,) = allocation.groups
    devices = sorted({1 << n for n in range(group.devices_per_node.bit_length())})
    nodes = sorted({1 << n for n in range(group.nodes.bit_length())} | {group.nodes})
    each = group.devices_per_node
    shapes = [(1, count) for count in devices] + [(count, each) for count in nodes]
    return list(dict.fromkeys(f"{n}x{d}:{group.machine}" for n, d in shapes))


def _rate(answer: Estimate) -> str:
    return format_count(answer.samples_per_s).strip() if answer.samples_per_s else ""


def _beside(predicted_s: float, observed_s: float) -> str:
    return f"{format_seconds(predicted_s)} ({100 * (predicted_s / observed_s - 1):+.0f} %)"
