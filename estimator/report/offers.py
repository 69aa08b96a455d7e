"""Draw offers of machines: what training costs against how long it takes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from estimator.advise.choices import Choice
from estimator.errors import StoreError, cause
from estimator.machines.files import write_bytes_atomically


def draw_offers(choice: Choice, path: Path) -> None:
    """Plot every offer to a .png or .svg file, those that no other beats joined and named.

    Raises StoreError if matplotlib is missing or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise StoreError(
            "a picture needs matplotlib; install throughput-estimator[report]"
        ) from None
    figure: Any = Figure(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.subplots()
    hours = [each.duration_s / 3600 for each in choice.offers]
    axes.scatter(hours, [each.usd for each in choice.offers], s=12, color="0.7")
    front = [(each.duration_s / 3600, each.usd) for each in choice.front]
    if front:
        axes.plot(*zip(*front, strict=True), marker="o")
    for number, (each, at) in enumerate(zip(choice.front, front, strict=True)):
        axes.errorbar(
            *at,
            xerr=[[at[0] - each.low_s / 3600], [each.high_s / 3600 - at[0]]],
            yerr=[[at[1] - each.low_usd], [each.high_usd - at[1]]],
            color="0.6",
            zorder=0,
        )
        # Neighbours' names on either side of the line.
        beside = (4, 4 if number % 2 == 0 else -12)
        axes.annotate(each.allocation, at, fontsize=8, xytext=beside, textcoords="offset points")
    axes.set(xlabel="time (h)", ylabel="cost (USD)", xscale="log", yscale="log")
    content = io.BytesIO()
    try:
        figure.savefig(content, format=path.suffix.removeprefix("."))
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot draw {path} ({cause(error)}); name a .png or .svg file") from None
    write_bytes_atomically(path, content.getvalue())
