"""Draw replays: devices held over time, and the distribution of completion times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from estimator.cluster.replay import Ran
from estimator.report.pictures import empty_figure, save_figure


def draw_replays(replays: Mapping[str, Sequence[Ran]], path: Path) -> None:
    """Write a picture of the replays of the same jobs under several policies, as .png or .svg.

    Raises StoreError if matplotlib is missing or the file cannot be written.
    """
    figure = empty_figure(width_inches=10.0, height_inches=4.0)
    over_time, completion = figure.subplots(1, 2)
    for name, ran in replays.items():
        times, held = held_over_time(ran)
        over_time.step(times / 3600, held, where="post", label=name, linewidth=1)
        jct = np.sort([each.completion_s for each in ran]) / 3600
        completion.step(jct, 100 * np.arange(1, len(jct) + 1) / len(jct), where="post", linewidth=1)
    over_time.set(xlabel="hours", ylabel="devices held", xlim=(0, None), ylim=(0, None))
    completion.set(xlabel="completion time (hours)", ylabel="% of jobs", ylim=(0, 100))
    completion.set_xscale("log")
    figure.legend(loc="outside right upper")
    save_figure(figure, path)


def held_over_time(ran: Sequence[Ran]) -> tuple[np.ndarray, np.ndarray]:
    """Times at which jobs took or gave devices, and how many all held from then on."""
    changes: dict[float, int] = {}
    for each in ran:
        for segment in each.segments:
            for at, sign in ((segment.start_s, 1), (segment.end_s, -1)):
                changes[at] = changes.get(at, 0) + sign * segment.shape.ranks
    times = sorted(changes)
    return np.array(times), np.cumsum([changes[at] for at in times])
