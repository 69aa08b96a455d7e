"""Describe answers about one model as sections: facts, tables, sentences and figures.

A terminal, an HTML page and a notebook each render the same sections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from estimator.errors import EstimatorError, PriceError
from estimator.report.facts import (
    FITS_WORDS,
    answer_facts,
    checked_of,
    format_interval,
    heading,
    part_name,
)
from estimator.units import format_bytes, format_count, format_error, format_ratio, format_seconds

if TYPE_CHECKING:
    from estimator.advise.memory import MemoryReport, ModuleCost, Remedy
    from estimator.advise.scaling import Scaling, SweepRow
    from estimator.advise.shared_device import SharedDevice
    from estimator.advise.swap.search import Planned
    from estimator.estimates.balance import Balance
    from estimator.estimates.estimate import Estimate
    from estimator.machines.prices import PriceList
    from estimator.placement.allocation import Allocation
    from estimator.report.pictures import Track
    from estimator.validate.training import Validation

# Smaller parts of a step are shown only where everything is.
_LEAST_SHARE = 0.01
_MOST_MODULES, _MOST_HOLDERS = 40, 12
# Costs are compared per so many samples where nobody says how many there are.
_SAMPLES = 1e6


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as people read them; the last `numbers` columns are figures.

    A row with a single cell is the heading of those below it. `bars` has a ratio for each row,
    drawn beside its first cell.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: int
    bars: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """A title with what stands below it; `name` is that of its figure, which matplotlib draws."""

    title: str = ""
    facts: Sequence[tuple[str, str]] = ()
    table: Table | None = None
    sentences: Sequence[str] = ()
    items: Sequence[str] = ()
    name: str = ""
    tracks: Sequence[Track] = ()
    step_s: float = 0.0
    figure: Any = None

    @property
    def anchor(self) -> str:
        """What a link within a page names it by."""
        return self.name or "-".join(filter(str.isalnum, self.title.split()))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show below the title."""
        rows = self.table.rows if self.table else ()
        return not (self.facts or rows or self.sentences or self.items or self.tracks)


def estimate_sections(
    answer: Estimate,
    *,
    duration_s: float | None = None,
    scaling: Scaling | None = None,
    balance: Balance | None = None,
    remedies: Sequence[Remedy] = (),
    modules: Sequence[ModuleCost] = (),
    more: Sequence[Section] = (),
    verbose: bool = False,
) -> list[Section]:
    """Everything about one estimate, the time first; `more` stands before what it rests on.

    If `verbose` also the smallest parts, and what each number is known by.
    """
    facts = answer_facts(
        answer, duration_s=duration_s, scaling=scaling, balance=balance, remedies=remedies
    )
    least_ratio = 0.0 if verbose else _LEAST_SHARE
    return [
        Section(heading(answer), facts=facts, name="answer"),
        breakdown_section(answer, least_ratio=least_ratio),
        _memory_parts(answer, least_ratio=least_ratio),
        *([modules_section(modules)] if modules else []),
        *more,
        *([_provenance(answer), _checked(answer)] if verbose else []),
        Section("assumptions", items=answer.assumptions),
    ]


def breakdown_section(answer: Estimate, *, least_ratio: float = 0.0) -> Section:
    """Where the time of the step goes; the parts add up to it."""
    seconds = {
        part_name(item.name): getattr(answer.breakdown, item.name)
        for item in fields(answer.breakdown)
    }
    table = _shares("time", "share", seconds, answer.step_time_s, format_seconds, least_ratio)
    return Section("where the time goes", table=table, name="time")


def _memory_parts(answer: Estimate, *, least_ratio: float) -> Section:
    """What takes memory, each at its own most: together they take no more than the peak."""
    sizes = {
        part_name(item.name.removesuffix("_bytes")): getattr(answer.memory, item.name)
        for item in fields(answer.memory)
        if item.name.endswith("_bytes") and item.name != "total_bytes"
    }
    peak = answer.memory.total_bytes or 1
    table = _shares("memory", "of peak", sizes, peak, format_bytes, least_ratio)
    return Section("what takes memory, each at its most", table=table)


def _shares(
    quantity: str,
    share: str,
    parts: dict[str, float],
    total: float,
    shown: Callable[[float], str],
    least_ratio: float,
) -> Table:
    kept = {name: part for name, part in parts.items() if part > 0 and part / total >= least_ratio}
    return Table(
        ("part", quantity, share),
        [(name, shown(part), format_ratio(part / total)) for name, part in kept.items()],
        numbers=2,
        bars=[part / total for part in kept.values()],
    )


def modules_section(rows: Sequence[ModuleCost]) -> Section:
    """One row a module, the longest first; small ones together, then the update."""
    *modules, update = rows
    groups = [(row.module, [row]) for row in modules[:_MOST_MODULES]]
    if rest := modules[_MOST_MODULES:]:
        groups.append((f"{len(rest)} others", rest))
    step_s = sum(row.time_s for row in rows)
    cells = []
    for name, group in [*groups, (update.module, [update])]:
        time_s, flops = sum(row.time_s for row in group), sum(row.flops for row in group)
        memory_bytes = sum(row.memory_bytes for row in group)
        cells.append(
            (
                *(name, format_seconds(time_s), format_ratio(time_s / step_s)),
                f"{format_count(flops)}FLOP" if flops else "",
                format_bytes(memory_bytes) if memory_bytes else "",
            )
        )
    return Section(
        "by module, on one rank (memory without the optimizer's state)",
        table=Table(("module", "time", "share", "FLOPs", "memory at the peak"), cells, numbers=4),
    )


def _provenance(answer: Estimate) -> Section:
    rows = [
        (part, source, format_ratio(share_ratio), format_error(relative_error))
        for part, source, share_ratio, relative_error in answer.provenance
    ]
    table = Table(("part", "source", "share of time", "error"), rows, numbers=2)
    return Section("where the numbers come from", table=table)


def _checked(answer: Estimate) -> Section:
    """What an estimate lacks: parts not measured, gaps of the profiles."""
    checked = checked_of(answer)
    in_grid = format_ratio(answer.op_time_in_grid_ratio)
    return Section(
        facts=[
            ("time that nothing measured backs", format_ratio(checked.unmeasured_ratio)),
            ("kernel time of shapes in the probe's grid", in_grid),
            ("disturbed when probed", ", ".join(checked.disturbed_machines) or "no machine"),
            ("probe cut short", ", ".join(checked.cut_machines) or "no machine"),
            ("GPU held back when probed", "; ".join(checked.device_faults) or "none"),
        ]
    )


def timeline_section(answer: Estimate) -> Section:
    """What each lane does when."""
    from estimator.report.pictures import timeline_figure, tracks_of

    timeline = answer.timeline
    return Section(
        "timeline of the step",
        name="timeline",
        tracks=tracks_of(timeline),
        step_s=timeline.step_time_s,
        figure=timeline_figure(timeline),
    )


def _rate(answer: Estimate) -> str:
    return format_count(answer.samples_per_s).strip() if answer.samples_per_s else ""


def sweep_sections(rows: Sequence[SweepRow]) -> list[Section]:
    """One row an estimate: step, throughput, and what rows differ in and are compared by.

    Rows of several batches say the memory, those of strategies what merges gradients where they
    differ in that, all others how they scale.
    """
    known = [(row, row.answer) for row in rows if row.answer is not None]
    answers = [answer for _, answer in known]
    first, strategies = answers[0], [row.strategy for row, _ in known if row.strategy is not None]
    by_batch = known[0][0].batch is not None
    cells = {"allocation": [row.allocation for row, _ in known]}
    if strategies:
        cells["strategy"] = [str(strategy) for strategy in strategies]
    if len({strategy.merged_on for strategy in strategies}) > 1:
        exposed = [answer.breakdown.communication_exposed_s for answer in answers]
        cells["merged on"] = [strategy.merged_on for strategy in strategies]
        cells["updated on"] = [strategy.updated_on for strategy in strategies]
        cells["exposed"] = [format_seconds(exposed_s) for exposed_s in exposed]
    fits = ["" if answer.fits == "yes" else FITS_WORDS[answer.fits] for answer in answers]
    if by_batch:
        largest = [row.is_largest for row, _ in known]
        cells[""] = ["largest that fits" if at else fit for at, fit in zip(largest, fits)]
    else:
        held = [answer.breakdown.largest_share for answer in answers]
        cells["bottleneck"] = [f"{kind} {format_ratio(ratio)}" for kind, ratio in held]
        cells |= {"memory": fits} if any(fits) else {}
    texts = len(cells)
    if by_batch:
        cells["batch"] = [str(row.batch) for row, _ in known]
    elif not strategies:
        cells["ranks"] = [str(answer.ranks) for answer in answers]
    cells["step"] = [format_interval(answer) for answer in answers]
    cells["samples/s"] = [_rate(answer) for answer in answers]
    if by_batch:
        cells["peak memory"] = [format_bytes(answer.peak_memory_bytes) for answer in answers]
    elif not strategies:
        ratios = [row.efficiency_ratio for row, _ in known]
        cells["of linear"] = ["" if ratio is None else format_ratio(ratio) for ratio in ratios]
    table = Table(list(cells), list(zip(*cells.values())), numbers=len(cells) - texts)
    how = "" if strategies else f", {first.strategy}"
    section = Section(f"{first.model}{how}, {first.optimizer}, {first.mode}", table=table)
    return [section, *_refused(rows, answers)]


def _refused(rows: Sequence[SweepRow], answers: Sequence[Estimate]) -> list[Section]:
    """Why rows of a sweep have no answer; of allocations only the first, and what is linear."""
    refused = [row for row in rows if row.answer is None]
    if rows[0].batch is not None or rows[0].strategy is not None:
        reasons = (f"{row.strategy or row.batch}: {row.refusal}" for row in refused)
        return [Section("left out", items=list(dict.fromkeys(reasons)))]
    smallest = min(answers, key=lambda answer: answer.ranks)
    why = f"{len(refused)} of {len(rows)} allocations, the first because "
    return [
        Section(sentences=[f"linear is the throughput per rank of {smallest.allocation}"]),
        Section("left out", items=[f"{why}{row.refusal}" for row in refused[:1]]),
    ]


def scaling_section(rows: Sequence[SweepRow]) -> Section:
    """How it scales from one device to the allocation."""
    from estimator.report.pictures import scaling_figure

    table = sweep_sections(rows)[0].table
    has_rates = any(row.answer and row.answer.samples_per_s for row in rows)
    figure = scaling_figure(rows) if has_rates else None
    return Section("scaling", name="scaling", table=table, figure=figure)


def memory_sections(report: MemoryReport, *, figure: Any = None) -> list[Section]:
    """The peak by kind, and what is alive at it by module and by tensor."""
    answer, curve = report.answer, report.curve
    batch = f", {answer.batch_per_gpu} per device" if answer.batch_per_gpu is not None else ""
    place = report.peak_op + (f" of {report.peak_module}" if report.peak_module else "")
    held = f"{format_bytes(curve.peak_bytes)} of {format_bytes(report.device_bytes)}"
    return [
        Section(
            f"{answer.model} on {answer.allocation}, {answer.strategy}{batch}",
            facts=[("peak memory", f"{held} ({FITS_WORDS[answer.fits]})"), ("reached in", place)],
        ),
        Section(
            "memory over the step, by kind", table=_kinds(report), name="memory", figure=figure
        ),
        Section("by module", table=_modules(report)),
        Section("largest of them", table=_tensors(report)),
    ]


def _kinds(report: MemoryReport) -> Table:
    curve = report.curve
    at_peak = sorted(curve.at(curve.peak_at).items(), key=lambda item: -item[1])
    rows = [
        (
            *(kind, format_bytes(size), format_ratio(size / curve.peak_bytes)),
            format_bytes(most),
        )
        for kind, size in at_peak
        if (most := int(curve.levels[kind].max()))
    ]
    return Table(("kind", "at the peak", "of it", "at most"), rows, numbers=3)


def _modules(report: MemoryReport) -> Table:
    sizes = list(report.modules.items())
    rest = sizes[_MOST_HOLDERS:]
    shown = [*sizes[:_MOST_HOLDERS]]
    shown += [(f"{len(rest)} others", sum(size for _, size in rest))] if rest else []
    columns = ("parameters, gradients and activations of", "bytes")
    return Table(columns, [(path, format_bytes(size)) for path, size in shown], numbers=1)


def _tensors(report: MemoryReport) -> Table:
    ops = len(report.curve.total) - 1
    rows = [
        (
            *(tensor.op or tensor.kind, tensor.module),
            str(tensor.born) if tensor.born >= 0 else "before",
            str(tensor.dies) if tensor.dies < ops else "the end",
            format_bytes(tensor.size_bytes),
        )
        for tensor in report.tensors[:_MOST_HOLDERS]
    ]
    return Table(("tensor", "of", "made by op", "held until", "bytes"), rows, numbers=3)


def drawn_memory_sections(answer: Estimate) -> list[Section]:
    """Those of memory with a figure, or why there are none."""
    from estimator.advise.memory import memory_of
    from estimator.report.pictures import memory_figure

    title = "memory over the step"
    if answer.layout is not None:
        words = f"Peak of {format_bytes(answer.peak_memory_bytes)}; its course is not drawn for "
        return [Section(title, sentences=[f"{words}layouts."])]
    try:
        report = memory_of(answer)
    except EstimatorError as error:
        return [Section(title, sentences=[str(error)])]
    return memory_sections(report, figure=memory_figure(report))[1:]


def remedies_section(remedies: Sequence[Remedy]) -> Section:
    """What would make it fit, cheapest first."""
    rows = [
        (
            *(remedy.change, format_bytes(remedy.peak_bytes), format_seconds(remedy.step_time_s)),
            f"{remedy.cost_ratio:+.1%}".replace("%", " %"),
        )
        for remedy in remedies
    ]
    table = Table(("change", "peak", "step", "device time"), rows, numbers=3)
    return Section("what would make it fit", table=table)


_UPDATED = {"end": "at the end", "ready": "as ready"}
_SWAPPED = {
    "activation": "activations",
    "gradient": "gradients",
    "parameter": "parameters",
    "state": "optimizer state",
}


def plans_section(answer: Estimate, plans: Sequence[Planned]) -> Section:
    """Peak against time under plans of swapping and recomputing, and what a script does for it."""
    columns = ("peak", "lower by", "step", "longer by", "swapped", "computed again", "updates")
    rows = [
        (
            *(format_bytes(planned.played.peak_bytes), format_ratio(planned.played.saved_ratio)),
            format_seconds(planned.played.step_s),
            format_ratio(planned.played.overhead_ratio),
            *(str(len(planned.plan.swaps)), str(len(planned.plan.recomputes))),
            _UPDATED[planned.problem.updates],
        )
        for planned in plans
    ]
    table = Table(columns, rows, numbers=6)
    return Section("plans that lower the peak", table=table, sentences=_plans_words(answer, plans))


def _plans_words(answer: Estimate, plans: Sequence[Planned]) -> list[str]:
    """What plans of these kinds ask of a training script."""
    from estimator.advise.swap.problem import why_at_the_end

    words: list[str] = []
    if not plans:
        return words
    moved = {kind for planned in plans for kind in planned.swapped}
    if moved:
        kinds = ", ".join(name for kind, name in _SWAPPED.items() if kind in moved)
        words.append(
            f"swapped ({kinds}): copied to pinned memory of the host after one use and back before "
            "the next; est.apply_plan does so with activations alone, the script with the rest"
        )
    if any(planned.plan.recomputes for planned in plans):
        words.append("computed again: dropped in the forward pass and made in the backward pass")
    reason = why_at_the_end(answer.plan.kinds[0].program.bound.graph)
    if any(planned.problem.updates == "ready" for planned in plans):
        words.append(
            "updates as ready: the optimizer steps for each parameter as its gradient is ready; "
            "give each parameter an optimizer of its own, call its step() and zero_grad() in "
            "register_post_accumulate_grad_hook, and leave out the step at the end"
        )
    elif reason:
        words.append(f"updates stay at the step's end: {reason}")
    return words


def shared_device_sections(shared: SharedDevice) -> list[Section]:
    """Jobs on one device: what they hold together, each one's step, and under plans."""
    held = f"{format_bytes(shared.most_bytes)} of {format_bytes(shared.usable_bytes)}"
    played = f"{format_bytes(shared.played_bytes)} at most"
    if shared.over_ratio:
        played += f", more than there is for {format_ratio(shared.over_ratio)} of the time"
    facts = [
        ("together", f"{held} where their peaks meet ({FITS_WORDS[shared.fits]})"),
        ("played", played),
    ]
    rows = [
        (
            job.model if job.batch_per_gpu is None else f"{job.model}, {job.batch_per_gpu}",
            *(format_seconds(job.alone_s), format_seconds(job.step_time_s)),
            f"× {job.step_time_s / job.alone_s:.2f}",
            format_bytes(job.peak_bytes),
        )
        for job in shared.jobs
    ]
    columns = ("job, batch", "step alone", "beside the others", "", "peak")
    sections = [
        Section(f"{len(shared.jobs)} jobs on {shared.allocation}", facts=facts),
        Section("each job", table=Table(columns, rows, numbers=4)),
    ]
    if shared.plan_bytes is not None:
        planned = [
            (
                *(job.model, format_bytes(job.plan_peak_bytes or 0)),
                *(format_seconds(job.plan_step_s or 0.0), str(job.swaps), str(job.recomputes)),
            )
            for job in shared.jobs
        ]
        columns = ("job", "peak", "beside the others", "swapped", "computed again")
        title = f"plans with which all fit, {format_bytes(shared.plan_bytes)} together"
        sections.append(Section(title, table=Table(columns, planned, numbers=4)))
    elif shared.fits != "yes":
        sections.append(Section(sentences=["no plan of swapping and recomputing makes them fit"]))
    return sections


def validation_sections(cases: Iterable[Validation]) -> list[Section]:
    """Predicted beside measured, one row an allocation, then where the time was expected to go."""
    cases = tuple(cases)
    columns = ("allocation", "predicted", "measured", "noise", "error", "within interval")
    rows = [
        (
            *(str(case.predicted.allocation), format_interval(case.predicted)),
            *(format_seconds(case.measured_s), format_error(case.noise_ratio)),
            *(format_ratio(case.error_ratio), "yes" if case.is_within_interval else "no"),
        )
        for case in cases
    ]
    return [
        Section(
            f"{cases[0].predicted.model}: predicted first, then measured",
            table=Table(columns, rows, numbers=5),
            sentences=[_spent(case.predicted) for case in cases],
        )
    ]


def _spent(answer: Estimate) -> str:
    shares = [
        f"{part_name(item.name)} {format_ratio(seconds / answer.step_time_s)}"
        for item in fields(answer.breakdown)
        if (seconds := getattr(answer.breakdown, item.name)) > 0.0005 * answer.step_time_s
    ]
    return f"{answer.allocation} spends: {', '.join(shares)}"


def layouts_section(answer: Estimate, answer_as: Callable[[str, str | None], Estimate]) -> Section:
    """Other strategies and layouts on the same devices; `answer_as` takes both texts."""
    from estimator.workload.strategies import SEARCHED

    per_node = max(group.devices_per_node for group in answer.allocation.groups)
    powers = [1 << power for power in range(1, per_node.bit_length())]
    choices: list[tuple[str, str | None]] = [(answer.strategy, answer.layout)]
    choices += [(strategy, None) for strategy in SEARCHED]
    choices += [("ddp", f"tp={tp},dp=*") for tp in powers]
    answers, refused = [], []
    for strategy, layout in dict.fromkeys(choices):
        named = f"{layout}, {strategy}" if layout else strategy
        try:
            answers.append((named, answer_as(strategy, layout)))
        except EstimatorError as error:
            refused.append(f"{named}: {error}")
    # What does not fit comes last.
    answers.sort(key=lambda pair: (pair[1].fits == "no", -(pair[1].samples_per_s or 0.0)))
    rows = [
        (
            *(named, FITS_WORDS[other.fits], format_interval(other), _rate(other)),
            format_bytes(other.peak_memory_bytes),
        )
        for named, other in answers
    ]
    table = Table(("layout", "memory", "step", "samples/s", "peak"), rows, numbers=3)
    return Section("layouts", table=table, items=refused)


def cost_section(
    rows: Sequence[SweepRow], prices: PriceList, *, samples: float | None = None
) -> Section:
    """What training costs on each allocation of a sweep, instances paid whole."""
    from estimator.advise.rent.offers import hourly_usd, paid_usd

    amount = samples or _SAMPLES
    cells: list[tuple[str, ...]] = []
    note = "On-demand prices, whole instances, time as it is billed."
    for row in rows:
        answer = row.answer
        if answer is None or not answer.samples_per_s:
            continue
        duration_s = amount / answer.samples_per_s
        try:
            usd_per_hour = hourly_usd(prices, answer.allocation)
            usd = paid_usd(prices, answer.allocation, duration_s)
        except PriceError as error:
            note = str(error)
            continue
        cells.append(
            (
                *(row.allocation, FITS_WORDS[answer.fits], f"{usd_per_hour:.2f}"),
                *(format_seconds(duration_s), f"{usd:.2f}"),
            )
        )
    columns = ("allocation", "memory", "USD per hour", f"{format_count(amount)}samples", "USD")
    table = Table(columns, cells, numbers=3) if cells else None
    return Section("cost", table=table, sentences=[note])


def smaller_allocations(allocation: Allocation) -> list[str]:
    """One device, then doubled up to a node, then nodes, up to the allocation itself.

    >>> from estimator.placement.allocation import Allocation
    >>> smaller_allocations(Allocation.parse("3x4:t4-g4dn"))
    ['1x1:t4-g4dn', '1x2:t4-g4dn', '1x4:t4-g4dn', '2x4:t4-g4dn', '3x4:t4-g4dn']
    """
    if len(allocation.groups) > 1 or allocation.groups[0].machine is None:
        return [str(allocation)]
    (group,) = allocation.groups
    devices = sorted({1 << n for n in range(group.devices_per_node.bit_length())})
    nodes = sorted({1 << n for n in range(group.nodes.bit_length())} | {group.nodes})
    shapes = [(1, count) for count in devices]
    shapes += [(count, group.devices_per_node) for count in nodes]
    return list(dict.fromkeys(f"{n}x{d}:{group.machine}" for n, d in shapes))
