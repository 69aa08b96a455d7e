"""Draw what a step holds in memory over time, by kind, and its peak against time under plans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estimator.advise.memory import MemoryReport
from estimator.advise.swap_search import Planned
from estimator.report.pictures import empty_figure, save_figure, shades, title_of
from estimator.units import GIB, time_unit

# More than a picture has points across.
_MOST_PLACES = 1200


def draw_memory(report: MemoryReport, path: Path, plans: Sequence[Planned] = ()) -> None:
    """Write a picture of memory over a step as .png or .svg, beside the curve of plans, if any.

    Raises StoreError if matplotlib is missing or the file cannot be written.
    """
    save_figure(memory_figure(report, plans), path)


def memory_figure(report: MemoryReport, plans: Sequence[Planned] = ()) -> Any:
    """The picture of memory over a step; raises StoreError if matplotlib is missing."""
    figure = empty_figure(width_inches=10.0, height_inches=9.0 if plans else 4.5)
    top, *below = figure.subplots(2 if plans else 1, squeeze=False)[:, 0]
    _draw_levels(top, report)
    for axes in below:
        _draw_plans(axes, report, plans)
    return figure


def _draw_levels(axes: Any, report: MemoryReport) -> None:
    shown = {kind: each for kind, each in report.curve.levels.items() if each.any()}
    drawn = _highest(report.curve.total)
    starts_s = report.times_s
    # Each level holds from the start of its op to its end.
    levels = [np.append(each[drawn], each[-1]) / GIB for each in shown.values()]
    colours = shades(len(shown), brightest=0.95)
    unit_s, unit = time_unit(float(starts_s[-1]))
    drawn_at = starts_s[np.append(drawn, -1)] / unit_s
    axes.stackplot(drawn_at, *levels, labels=list(shown), colors=colours, step="post", linewidth=0)
    peak = report.curve.peak_at
    axes.plot(
        starts_s[peak] / unit_s,
        report.curve.peak_bytes / GIB,
        marker="v",
        color="black",
        clip_on=False,
    )
    if report.curve.peak_bytes > 0.5 * report.device_bytes:
        axes.axhline(report.device_bytes / GIB, color="red", linewidth=1, label="device memory")
    title = f"{report.answer.model} on {report.answer.allocation}: peak in {report.peak_op}"
    steps = report.answer.accumulation_steps
    axes.set(
        xlabel=unit if steps == 1 else f"{unit} of the step, in the last of {steps} micro-batches",
        ylabel="GiB",
        xlim=(starts_s[0] / unit_s, starts_s[-1] / unit_s),
        ylim=(0, None),
    )
    axes.set_title(title_of(title, characters=70))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _highest(total: NDArray[np.int64]) -> NDArray[np.intp]:
    """The places that are drawn of many: of each stretch the one that holds most."""
    stretches = np.array_split(np.arange(len(total)), min(len(total), _MOST_PLACES))
    return np.array([places[total[places].argmax()] for places in stretches])


def _draw_plans(axes: Any, report: MemoryReport, plans: Sequence[Planned]) -> None:
    """The least peak found within each time: a step down wherever a plan is worth its time."""
    unit_s, unit = time_unit(max(each.played.step_s for each in plans))
    steps = [each.played.step_s / unit_s for each in plans]
    peaks = [each.played.peak_bytes / GIB for each in plans]
    axes.step(steps, peaks, where="post", color="black", linewidth=1)
    axes.plot(steps, peaks, "o", color="black", label="a plan")
    plain = plans[0].played
    plain_step = plain.vanilla_s / unit_s
    plain_gib = plain.vanilla_bytes / GIB
    axes.plot(plain_step, plain_gib, "ko", fillstyle="none", label="without a plan")
    if min(peaks) < report.device_bytes / GIB < 2 * max(peaks):
        axes.axhline(report.device_bytes / GIB, color="red", linewidth=1, label="device memory")
    axes.set(
        xlabel=f"{unit} per step",
        ylabel="GiB at the peak",
        ylim=(0, None),
        title="Peak against time: tensors swapped to the host or computed again",
    )
    ratios = (lambda x: 100 * (x / plain_step - 1), lambda ratio: plain_step * (1 + ratio / 100))
    axes.secondary_xaxis("top", functions=ratios).set_xlabel("% longer than without a plan")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
