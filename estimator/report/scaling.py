"""Draw a sweep: throughput and efficiency against the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from estimator.advise.sweeps import SweepRow
from estimator.errors import StoreError


def draw_scaling(rows: Sequence[SweepRow], path: Path) -> None:
    """Write a picture of a sweep as .png or .svg; one line for each number of nodes.

    Raises StoreError if matplotlib is missing or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise StoreError(
            "a picture needs matplotlib; install throughput-estimator[report]"
        ) from None
    figure: Any = Figure(figsize=(8.0, 4.0), layout="constrained")
    speed, efficiency = figure.subplots(1, 2)
    for nodes, points in sorted(_by_nodes(rows).items()):
        ranks, throughput, low, high, ratio = zip(*sorted(points), strict=True)
        label = "1 node" if nodes == 1 else f"{nodes} nodes"
        speed.plot(ranks, throughput, marker="o", label=label)
        speed.fill_between(ranks, low, high, alpha=0.15)
        efficiency.plot(ranks, [100 * value for value in ratio], marker="o", label=label)
    first = next(row.answer for row in rows if row.answer is not None)
    figure.suptitle(f"{first.model}, {first.strategy}")
    speed.set(xlabel="ranks", ylabel="samples/s", xlim=(0, None), ylim=(0, None))
    efficiency.set(xlabel="ranks", ylabel="% of linear", xlim=(0, None), ylim=(0, 105))
    efficiency.axhline(100, color="grey", linewidth=0.8, linestyle=":")
    speed.legend(title="80 % interval shaded")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot draw {path} ({error}); name a .png or .svg file") from None


def _by_nodes(rows: Sequence[SweepRow]) -> dict[int, list[tuple[float, ...]]]:
    found: dict[int, list[tuple[float, ...]]] = {}
    for row in rows:
        answer = row.answer
        if answer is None or not answer.samples_per_s or answer.global_batch is None:
            continue
        found.setdefault(answer.allocation.nodes, []).append(
            (
                answer.ranks,
                answer.samples_per_s,
                answer.global_batch / answer.high_s,
                answer.global_batch / answer.low_s,
                row.efficiency_ratio or 0.0,
            )
        )
    return found
