"""Draw a sweep: throughput and efficiency against the number of devices."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from estimator.advise.sweeps import SweepRow
from estimator.estimates import Estimate
from estimator.machines.files import write_bytes_atomically
from estimator.report.pictures import empty_figure, save_figure, shades, title_of

# Of the legend, beside a picture of this height.
_LINES_OF_COLUMN = 18
# Of the title.
_MOST_MACHINES = 3
_MOST_LARGE_MARKERS = 20


class _Point(NamedTuple):
    devices: int
    samples_per_s: float
    low_per_s: float
    high_per_s: float
    efficiency_ratio: float


class _Shape(NamedTuple):
    """The composition of an allocation; `per_node` is a mean where nodes differ."""

    machines: str
    nodes: int
    per_node: float


def draw_scaling(rows: Sequence[SweepRow], path: Path) -> None:
    """Plot a sweep to a .png or .svg file; `lines_of` defines its lines.

    Raises StoreError if matplotlib is missing or the file cannot be written.
    """
    drawn = io.BytesIO()
    save_figure(scaling_figure(rows), path, to=drawn)
    write_bytes_atomically(path, drawn.getvalue())


def scaling_figure(rows: Sequence[SweepRow]) -> Any:
    """The picture of a sweep; raises StoreError if matplotlib is missing."""
    lines = lines_of(rows)
    columns = -(-(len(lines) + 1) // _LINES_OF_COLUMN)
    figure = empty_figure(width_inches=9.0 + columns, height_inches=4.0)
    speed, efficiency = figure.subplots(1, 2)
    colours = shades(len(lines), brightest=0.85)
    for number, (label, points) in enumerate(lines.items()):
        colour = colours[number]
        devices, throughput, low, high, ratio = zip(*sorted(points), strict=True)
        marker = {"marker": "o", "markersize": 5 if len(points) <= _MOST_LARGE_MARKERS else 2}
        speed.plot(devices, throughput, label=label, color=colour, **marker)
        if len(points) == 1:
            speed.vlines(devices, low, high, color=colour, alpha=0.3, linewidth=4)
        else:
            speed.fill_between(devices, low, high, color=colour, alpha=0.15, linewidth=0)
        efficiency.plot(devices, [100 * value for value in ratio], color=colour, **marker)
    title = _title([row.answer for row in rows if row.answer is not None])
    # The legend stands beside it.
    figure.suptitle(title_of(title, characters=70))
    speed.set(xlabel="devices", ylabel="samples/s", xlim=(0, None), ylim=(0, None))
    # The smallest allocation counts as linear; one on faster devices may be above it.
    highest = max([1.0, *(point.efficiency_ratio for line in lines.values() for point in line)])
    efficiency.set(xlabel="devices", ylabel="% of linear", xlim=(0, None), ylim=(0, 105 * highest))
    for axes in (speed, efficiency):
        axes.xaxis.get_major_locator().set_params(integer=True)
    efficiency.axhline(100, color="grey", linewidth=0.8, linestyle=":", label="linear")
    figure.legend(
        loc="outside right upper", title="80 % interval shaded", ncols=columns, fontsize="small"
    )
    return figure


def _title(answers: Sequence[Estimate]) -> str:
    """The model, how it is trained, and on which machines."""
    first = answers[0]
    machines = list(dict.fromkeys(_shape(answer).machines for answer in answers))
    if len(machines) > _MOST_MACHINES:
        machines = [f"{len(machines)} machines"]
    batch = "as traced" if first.global_batch is None else f"{first.global_batch} a step"
    if first.batch_per_gpu is not None and len({each.batch_per_gpu for each in answers}) == 1:
        batch = f"{first.batch_per_gpu} per device"
    where = f"{first.model} on {', '.join(machines)}"
    return f"{where}: {first.precision}, batch {batch}, {first.strategy}"


def lines_of(rows: Sequence[SweepRow]) -> dict[str, list[_Point]]:
    """The points of each line by its label; rows without a rate have none.

    A line has the same machines and the same number of nodes, or of devices on each: whichever
    has fewer values, and so makes fewer lines.
    """
    rated = [(row, row.answer) for row in rows if row.answer and row.answer.samples_per_s]
    shapes = [_shape(answer) for _, answer in rated]
    by_nodes = len({shape.nodes for shape in shapes}) <= len({shape.per_node for shape in shapes})
    is_one_type = len({shape.machines for shape in shapes}) <= 1
    found: dict[tuple[str, float], list[_Point]] = {}
    for (row, answer), shape in zip(rated, shapes, strict=True):
        key = shape.machines, shape.nodes if by_nodes else shape.per_node
        found.setdefault(key, []).append(_point(row, answer))
    noun, of_each = ("node", "") if by_nodes else ("device", " a node")
    return {
        ("" if is_one_type else f"{machines}, ")
        + f"{count:g} {noun}{'' if count == 1 else 's'}{of_each}": found[machines, count]
        for machines, count in sorted(found)
    }


def _shape(answer: Estimate) -> _Shape:
    allocation = answer.allocation
    machines = sorted({group.machine or group.host or "" for group in allocation.groups})
    return _Shape("+".join(machines), allocation.nodes, answer.ranks / allocation.nodes)


def _point(row: SweepRow, answer: Estimate) -> _Point:
    samples = (answer.samples_per_s or 0.0) * answer.step_time_s
    return _Point(
        devices=answer.ranks,
        samples_per_s=answer.samples_per_s or 0.0,
        low_per_s=samples / answer.high_s,
        high_per_s=samples / answer.low_s,
        efficiency_ratio=row.efficiency_ratio or 0.0,
    )
