"""Lay out estimates, sweeps, validations, memory and modules as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

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
    from estimator.advise.swap.search import Planned
    from estimator.estimates.balance import Balance
    from estimator.estimates.estimate import Estimate
    from estimator.validate.validation import Validation


BAR_WIDTH = 32
# Smaller parts of a step are shown only to who asks for everything.
_LEAST_SHARE = 0.01


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Names and what belongs to them, side by side."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def grid(title: str, *columns: str, numbers: int = 0) -> Table:
    """A table whose last `numbers` columns are right-aligned figures."""
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    for index, column in enumerate(columns):
        is_number = index >= len(columns) - numbers
        table.add_column(column, justify="right" if is_number else "left", no_wrap=is_number)
    return table


def _bar(ratio: float, width: int = BAR_WIDTH) -> str:
    return "█" * round(max(0.0, ratio) * width)


def listed(heading: str, lines: Sequence[str]) -> Table | None:
    """Sentences below a heading; None if there are none."""
    if not lines:
        return None
    table = Table(
        title=heading, title_justify="left", box=None, show_header=False, padding=(0, 1, 0, 0)
    )
    for line in lines:
        table.add_row("-", line)
    return table


def stacked(*parts: RenderableType | None) -> Group:
    """The parts that there are, below each other with a blank line between."""
    shown = [part for part in parts if part is not None]
    return Group(*(item for part in shown for item in (part, Text())))


def estimate_report(
    answer: Estimate,
    *,
    duration_s: float | None = None,
    scaling: Scaling | None = None,
    balance: Balance | None = None,
    remedies: Sequence[Remedy] = (),
    verbose: bool = False,
    modules: Table | None = None,
) -> Group:
    """What a person wants of one estimate, the time first; if verbose, everything."""
    rows = answer_facts(
        answer, duration_s=duration_s, scaling=scaling, balance=balance, remedies=remedies
    )
    return stacked(
        Group(Text(heading(answer), style="bold"), facts(rows)),
        _breakdown_table(answer, least_ratio=0.0 if verbose else _LEAST_SHARE),
        _memory_table(answer, least_ratio=0.0 if verbose else _LEAST_SHARE),
        modules,
        _provenance_table(answer) if verbose else None,
        _checked_facts(answer) if verbose else None,
        listed("assumptions", answer.assumptions),
        None if verbose else Text("--verbose says what each number is known by", style="dim"),
    )


def _held_back_by(answer: Estimate) -> str:
    """What limits a row, short enough for a table in 80 columns."""
    kind, share_ratio = answer.breakdown.largest_share
    return f"{kind} {format_ratio(share_ratio)}"


def _memory_column(answers: Iterable[Estimate | None]) -> tuple[str, ...]:
    """The heading of a column that says what does not surely fit; none where all does."""
    return ("memory",) if any(each and each.fits != "yes" for each in answers) else ()


def _memory_cell(answer: Estimate, column: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("" if answer.fits == "yes" else FITS_WORDS[answer.fits] for _ in column)


def sweep_report(rows: Sequence[SweepRow]) -> Group:
    """One row an allocation: step, throughput, efficiency and what holds it back."""
    answers = [row.answer for row in rows if row.answer is not None]
    first, memory = answers[0], _memory_column(answers)
    table = grid(
        f"{first.model}, {first.strategy}, {first.optimizer}, {first.mode}",
        "allocation",
        "bottleneck",
        *memory,
        "ranks",
        "step",
        "samples/s",
        "of linear",
        numbers=4,
    )
    for row in rows:
        if row.answer is None:
            continue
        answer = row.answer
        table.add_row(
            row.allocation,
            _held_back_by(answer),
            *_memory_cell(answer, memory),
            str(answer.ranks),
            format_interval(answer),
            format_count(answer.samples_per_s).strip() if answer.samples_per_s else "",
            "" if row.efficiency_ratio is None else format_ratio(row.efficiency_ratio),
        )
    smallest = min(answers, key=lambda answer: answer.ranks)
    against = Text(f"linear is the throughput per rank of {smallest.allocation}", style="dim")
    refused = [row for row in rows if row.answer is None]
    if not refused:
        return stacked(table, against)
    why = f"{len(refused)} of {len(rows)} allocations, the first because {refused[0].refusal}"
    return stacked(table, against, listed("left out", [why]))


def batches_report(rows: Sequence[SweepRow]) -> Group:
    """One row a batch of each allocation: step, throughput, memory, the largest that fits."""
    first = next(row.answer for row in rows if row.answer is not None)
    table = grid(
        f"{first.model}, {first.strategy}, {first.optimizer}, {first.mode}",
        "allocation",
        "",
        "batch",
        "step",
        "samples/s",
        "peak memory",
        numbers=4,
    )
    for row in rows:
        answer = row.answer
        if answer is not None:
            remark = "largest that fits" if row.is_largest else ""
            table.add_row(
                row.allocation,
                remark or ("" if answer.fits == "yes" else FITS_WORDS[answer.fits]),
                str(row.batch),
                format_interval(answer),
                format_count(answer.samples_per_s).strip() if answer.samples_per_s else "",
                format_bytes(answer.peak_memory_bytes),
            )
    refused = dict.fromkeys(f"{row.batch}: {row.refusal}" for row in rows if not row.answer)
    return stacked(table, listed("left out", list(refused)) if refused else None)


def strategies_report(rows: Sequence[SweepRow]) -> Group:
    """One row a strategy, the fastest of each allocation first."""
    first = next(row.answer for row in rows if row.answer is not None)
    memory = _memory_column(row.answer for row in rows)
    table = grid(
        f"{first.model}, {first.optimizer}, {first.mode}",
        "allocation",
        "strategy",
        "bottleneck",
        *memory,
        "step",
        "samples/s",
        numbers=2,
    )
    for row in rows:
        answer = row.answer
        if answer is not None:
            table.add_row(
                row.allocation,
                str(row.strategy),
                _held_back_by(answer),
                *_memory_cell(answer, memory),
                format_interval(answer),
                format_count(answer.samples_per_s).strip() if answer.samples_per_s else "",
            )
    refused = dict.fromkeys(f"{row.strategy}: {row.refusal}" for row in rows if not row.answer)
    return stacked(table, listed("left out", list(refused)) if refused else None)


def _breakdown_table(answer: Estimate, *, least_ratio: float) -> Table:
    table = grid("where the time goes", "part", "", "time", "share", numbers=2)
    for field in fields(answer.breakdown):
        seconds = getattr(answer.breakdown, field.name)
        ratio = seconds / answer.step_time_s
        if seconds > 0 and ratio >= least_ratio:
            table.add_row(
                part_name(field.name), _bar(ratio), format_seconds(seconds), format_ratio(ratio)
            )
    return table


def _memory_table(answer: Estimate, *, least_ratio: float) -> Table | None:
    """What takes memory, each at its own most: together they take no more than the peak."""
    peak = answer.memory.total_bytes
    if not peak:
        return None
    table = grid("what takes memory, each at its most", "part", "", "memory", "of peak", numbers=2)
    for field in fields(answer.memory):
        if not field.name.endswith("_bytes") or field.name == "total_bytes":
            continue
        size_bytes = getattr(answer.memory, field.name)
        if size_bytes > 0 and size_bytes >= least_ratio * peak:
            ratio = size_bytes / peak
            name = field.name.removesuffix("_bytes").replace("_", " ")
            table.add_row(name, _bar(ratio), format_bytes(size_bytes), format_ratio(ratio))
    return table


def _provenance_table(answer: Estimate) -> Table:
    table = grid(
        "where the numbers come from", "part", "source", "share of time", "error", numbers=2
    )
    for part, source, share_ratio, relative_error in answer.provenance:
        table.add_row(part, source, format_ratio(share_ratio), format_error(relative_error))
    return table


def _checked_facts(answer: Estimate) -> Table:
    """What an estimate lacks: parts not measured, gaps of the profiles."""
    checked = checked_of(answer)
    in_grid = format_ratio(answer.op_time_in_grid_ratio)
    rows = [
        ("time that nothing measured backs", format_ratio(checked.unmeasured_ratio)),
        ("kernel time of shapes in the probe's grid", in_grid),
        ("disturbed when probed", ", ".join(checked.disturbed_machines) or "no machine"),
        ("probe cut short", ", ".join(checked.cut_machines) or "no machine"),
        ("GPU held back when probed", "; ".join(checked.device_faults) or "none"),
    ]
    return facts(rows)


def validation_report(cases: Iterable[Validation]) -> Group:
    """Predicted beside measured, one row an allocation, then where the time was expected to go."""
    cases = tuple(cases)
    table = grid(
        f"{cases[0].predicted.model}: predicted first, then measured",
        "allocation",
        "predicted",
        "measured",
        "noise",
        "error",
        "within interval",
        numbers=5,
    )
    for case in cases:
        table.add_row(
            str(case.predicted.allocation),
            format_interval(case.predicted),
            format_seconds(case.measured_s),
            format_error(case.noise_ratio),
            format_ratio(case.error_ratio),
            "yes" if case.is_within_interval else "no",
        )
    return Group(table, Text(), *(_validated_breakdown(case) for case in cases))


def _validated_breakdown(case: Validation) -> Text:
    step_s = case.predicted.step_time_s
    shares = [
        f"{part_name(field.name)} {format_ratio(seconds / step_s)}"
        for field in fields(case.predicted.breakdown)
        if (seconds := getattr(case.predicted.breakdown, field.name)) > 0.0005 * step_s
    ]
    return Text(f"{case.predicted.allocation} spends: {', '.join(shares)}")


_MOST_ROWS = 40


def modules_table(rows: Sequence[ModuleCost]) -> Table:
    """One row a module, the longest first; small ones together, then the update."""
    columns = "module", "time", "share", "FLOPs", "memory at the peak"
    table = grid(
        "by module, on one rank (memory without the optimizer's state)", *columns, numbers=4
    )
    whole_s = sum(row.time_s for row in rows)
    *modules, update = rows
    for row in modules[:_MOST_ROWS]:
        _add(table, row.module, [row], whole_s)
    if rest := modules[_MOST_ROWS:]:
        _add(table, f"{len(rest)} others", rest, whole_s)
    _add(table, update.module, [update], whole_s)
    return table


def _add(table: Table, name: str, rows: Sequence[ModuleCost], whole_s: float) -> None:
    time_s, flops = sum(row.time_s for row in rows), sum(row.flops for row in rows)
    memory_bytes = sum(row.memory_bytes for row in rows)
    table.add_row(
        name,
        format_seconds(time_s),
        format_ratio(time_s / whole_s),
        f"{format_count(flops)}FLOP" if flops else "",
        format_bytes(memory_bytes) if memory_bytes else "",
    )


_MOST_ROWS = 12


def memory_report(report: MemoryReport, *more: RenderableType | None) -> Group:
    """The peak by kind, and what is alive at it by module and by tensor."""
    answer, curve = report.answer, report.curve
    batch = f", {answer.batch_per_gpu} per device" if answer.batch_per_gpu is not None else ""
    heading = f"{answer.model} on {answer.allocation}, {answer.strategy}{batch}"
    place = report.peak_op + (f" of {report.peak_module}" if report.peak_module else "")
    held = f"{format_bytes(curve.peak_bytes)} of {format_bytes(report.device_bytes)}"
    rows = [("peak memory", f"{held} ({FITS_WORDS[answer.fits]})"), ("reached in", place)]
    return stacked(
        Group(Text(heading, style="bold"), facts(rows)),
        _kinds(report),
        _modules(report),
        _tensors(report),
        *more,
    )


def _kinds(report: MemoryReport) -> Table:
    curve = report.curve
    table = grid("By kind", "kind", "at the peak", "of it", "at most", numbers=3)
    for kind, size in sorted(curve.at(curve.peak_at).items(), key=lambda item: -item[1]):
        most = int(curve.levels[kind].max())
        if most:
            share = format_ratio(size / curve.peak_bytes)
            table.add_row(kind, format_bytes(size), share, format_bytes(most))
    return table


def _modules(report: MemoryReport) -> Table:
    table = grid("By module", "parameters, gradients and activations of", "bytes", numbers=1)
    rows = list(report.modules.items())
    for path, size in rows[:_MOST_ROWS]:
        table.add_row(path, format_bytes(size))
    if len(rows) > _MOST_ROWS:
        rest = sum(size for _, size in rows[_MOST_ROWS:])
        table.add_row(f"{len(rows) - _MOST_ROWS} others", format_bytes(rest))
    return table


def _tensors(report: MemoryReport) -> Table:
    ops = len(report.curve.total) - 1
    table = grid("Largest of them", "tensor", "of", "made by op", "held until", "bytes", numbers=3)
    for tensor in report.tensors[:_MOST_ROWS]:
        born = str(tensor.born) if tensor.born >= 0 else "before"
        dies = str(tensor.dies) if tensor.dies < ops else "the end"
        what = tensor.op or tensor.kind
        table.add_row(what, tensor.module, born, dies, format_bytes(tensor.size_bytes))
    return table


def remedies_table(remedies: Sequence[Remedy]) -> Table | None:
    """What would make it fit, cheapest first; None where nothing is listed."""
    if not remedies:
        return None
    table = grid("What would make it fit", "change", "peak", "step", "device time", numbers=3)
    for remedy in remedies:
        table.add_row(
            remedy.change,
            format_bytes(remedy.peak_bytes),
            format_seconds(remedy.step_time_s),
            f"{remedy.cost_ratio:+.1%}".replace("%", " %"),
        )
    return table


def plans_table(plans: Sequence[Planned]) -> Table | None:
    """Peak against time under plans of swapping and recomputing; None where none were asked for."""
    if not plans:
        return None
    columns = ("peak", "lower by", "step", "longer by", "swapped", "computed again")
    table = grid("Plans that lower the peak", *columns, numbers=len(columns))
    for each in plans:
        table.add_row(
            format_bytes(each.played.peak_bytes),
            format_ratio(each.played.saved_ratio),
            format_seconds(each.played.step_s),
            format_ratio(each.played.overhead_ratio),
            str(len(each.plan.swaps)),
            str(len(each.plan.recomputes)),
        )
    return table
