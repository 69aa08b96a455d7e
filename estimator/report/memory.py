"""Draw what a step holds in memory over time, by kind."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from estimator.advise.memory import MemoryReport
from estimator.report.pictures import empty_figure, save_figure, shades
from estimator.units import GIB


def draw_memory(report: MemoryReport, path: Path) -> None:
    """Write a picture of memory over a step as .png or .svg.

    Raises StoreError if matplotlib is missing or the file cannot be written.
    """
    figure = empty_figure(width_inches=10.0, height_inches=4.5)
    axes = figure.subplots()
    shown = {kind: each for kind, each in report.curve.levels.items() if each.any()}
    starts_s = np.append(0.0, report.time_s)
    # Each level holds from the start of its op to its end.
    levels = [np.append(each, each[-1]) / GIB for each in shown.values()]
    colours = shades(len(shown), brightest=0.95)
    axes.stackplot(
        1e3 * starts_s, *levels, labels=list(shown), colors=colours, step="post", linewidth=0
    )
    peak = report.curve.peak_at
    axes.plot(
        1e3 * starts_s[peak],
        report.curve.peak_bytes / GIB,
        marker="v",
        color="black",
        clip_on=False,
    )
    if report.curve.peak_bytes > 0.5 * report.device_bytes:
        axes.axhline(report.device_bytes / GIB, color="red", linewidth=1, label="device memory")
    title = f"{report.answer.model} on {report.answer.allocation}: peak in {report.peak_op}"
    axes.set(xlabel="ms", ylabel="GiB", xlim=(0, 1e3 * starts_s[-1]), ylim=(0, None), title=title)
    figure.legend(loc="outside right upper")
    save_figure(figure, path)
