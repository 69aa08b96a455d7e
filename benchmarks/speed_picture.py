"""Draw what an estimate costs against the ops of the model, the ranks and the unlike groups."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import matplotlib

matplotlib.use("svg")

from clocks import cpu_seconds, medians
from matplotlib import pyplot
from speed_cases import DEVICES, STRATEGY, Machines, model

from estimator import Allocation, OpGraph, estimate, estimate_many

# What is timed, in microseconds, and how it is drawn.
LINES = {
    "one event timeline": "C3",
    "one estimate": "C0",
    "one row of estimate_many": "C2",
}
ROWS, TURNS = 20_000, 6


def draw(path: str) -> None:
    """Time every size and write the picture."""
    machines, graph = Machines(), model()
    layers = (15, 30, 60, 120, 290, 600)
    by_ops = {len(g.ops): costs(g, machines.texts(100, groups=4)) for g in map(model, layers)}
    by_ranks = {ranks: costs(graph, halves(ranks)) for ranks in (16, 64, 256, 1024, 4096, 16384)}
    by_groups = {
        groups: costs(graph, machines.texts(100, groups=groups)) for groups in (1, 2, 4, 8, 16, 64)
    }
    pyplot.rcParams.update({"font.size": 9, "svg.hashsalt": "speed"})
    figure, axes = pyplot.subplots(1, 3, figsize=(10, 3.4), sharey=True, layout="constrained")
    for axis, measured, name in zip(
        axes,
        (by_ops, by_ranks, by_groups),
        ("ops of the model", "ranks", "groups of nodes, of 4 machine types"),
        strict=True,
    ):
        for line, colour in LINES.items():
            values = [cost[line] for cost in measured.values()]
            axis.plot(list(measured), values, "o-", color=colour, markersize=4, label=line)
        axis.set(xscale="log", yscale="log", xlabel=name)
        axis.set_xticks(list(measured), [f"{size:,}" for size in measured])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("microseconds")
    axes[0].set_ylim(0.3, 3e4)
    axes[0].legend(loc="upper left", fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def halves(ranks: int) -> list[str]:
    """Allocations of so many ranks, in two groups of unlike machines."""
    nodes = ranks // DEVICES
    splits = [1 + number % (nodes - 1) for number in range(100)]
    return [f"{k}x{DEVICES}:m0+{nodes - k}x{DEVICES}:m1" for k in splits]


def costs(graph: OpGraph, texts: Sequence[str]) -> dict[str, float]:
    """Microseconds of each line of the picture, everything compiled before; the least of turns."""
    parsed = [Allocation.parse(text) for text in texts]
    ask = partial(estimate, graph, strategy=STRATEGY)
    answers = [ask(each) for each in parsed]
    rows = [texts[number % len(texts)] for number in range(ROWS)]
    many = partial(estimate_many, graph, rows, strategy=STRATEGY)
    turns = [
        {
            "one event timeline": medians([lambda a=a: a.timeline for a in answers[:30]]),
            "one estimate": medians([partial(ask, each) for each in parsed]),
            "one row of estimate_many": cpu_seconds(many) / ROWS,
        }
        for _ in range(TURNS)
    ]
    return {line: 1e6 * min(turn[line] for turn in turns) for line in LINES}
