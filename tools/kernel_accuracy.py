"""Judge the kernel model on chips it was not fitted to, operator family by operator family.

    PYTHONPATH=benchmarks python tools/kernel_accuracy.py --data DIR [--bank DIR] [--json]

Every die in turn is left out, with all the boards that carry it (A100 PCIe and SXM are one die),
the kernel model is fitted to the others, and its predictions of the left-out rows are set beside
the plain roofline: the longer of flops over the peak and bytes over the memory's rate. With timm's
graphs (`--bank`), every family of vision models in turn is left out too, and its steps are
predicted by what the others teach of convolutions.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from kernel_fit import fit_kernel_model, predict
from kernel_tables import SOURCES, OpRow, read_op_tables
from options import add_data
from rich.console import Console
from rich.table import Table
from whole_models import design_of, vision_cases, without_own_family

from estimator.kernels.datasheet_model import peak_flops_per_s

# What must be reached on an unseen device: median, and mean for matmuls and attention, others.
MEDIAN_GOAL = 0.15
MEAN_GOALS = {"matmul": 0.20, "attention": 0.20}
OTHER_MEAN_GOAL = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Relative errors of one family of one source on one left-out die."""

    source: str
    family: str
    die: str
    rows: int
    median: float
    mean: float
    p90: float
    bias: float
    roofline_median: float
    roofline_mean: float

    @property
    def reached(self) -> bool:
        goal = MEAN_GOALS.get(self.family, OTHER_MEAN_GOAL)
        return self.median <= MEDIAN_GOAL and self.mean <= goal


def roofline_s(row: OpRow) -> float:
    """The plain roofline of Williams, Waterman and Patterson (2009)."""
    rate = row.device.memory_bandwidth_bytes_per_s or 1e12
    compute_s = row.flops / peak_flops_per_s(row.device, row.dtype)
    return max(compute_s, row.moved_bytes / rate)


def unseen_dies(rows: Sequence[OpRow]) -> list[Score]:
    """Scores of every (source, family, die), each die predicted without any row of its own."""
    scores = []
    for die in sorted({row.die for row in rows}):
        fitted = fit_kernel_model([row for row in rows if row.die != die])
        groups: dict[tuple[str, str], list[OpRow]] = defaultdict(list)
        for row in rows:
            if row.die == die:
                groups[row.source, row.family].append(row)
                groups["all", row.family].append(row)
        for (source, family), group in sorted(groups.items()):
            measured = np.array([row.seconds for row in group])
            errors = predict(fitted, group) / measured - 1.0
            plain = np.array([roofline_s(row) for row in group]) / measured - 1.0
            scores.append(
                Score(
                    source=source,
                    family=family,
                    die=die,
                    rows=len(group),
                    median=float(np.median(np.abs(errors))),
                    mean=float(np.mean(np.abs(errors))),
                    p90=float(np.quantile(np.abs(errors), 0.9)),
                    bias=float(np.median(errors)),
                    roofline_median=float(np.median(np.abs(plain))),
                    roofline_mean=float(np.mean(np.abs(plain))),
                )
            )
    return sorted(scores, key=lambda score: (score.family, score.die, score.source))


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionScore:
    """Relative errors of training steps of vision models in one layout, their family left out."""

    layout: str
    rows: int
    median: float
    p90: float
    bias: float


def unseen_families(folder: Path, bank: Path) -> list[VisionScore]:
    """Scores of timm's steps, each family of models predicted without any row of its own."""
    with Console(stderr=True).status("fitting timm's steps without each family in turn"):
        design = design_of(vision_cases(folder, bank))
        trained = design.only([not case.is_inference for case in design.cases])
        errors = without_own_family(design, trained) / trained.measured_s - 1.0
    layouts = np.array([case.layout for case in trained.cases])
    scores = []
    for layout in ("nchw", "nhwc", "both"):
        found = errors if layout == "both" else errors[layouts == layout]
        scores.append(
            VisionScore(
                layout=layout,
                rows=len(found),
                median=float(np.median(np.abs(found))),
                p90=float(np.quantile(np.abs(found), 0.9)),
                bias=float(np.median(found)),
            )
        )
    return scores


def main() -> None:
    """Fit without each die, judge on it, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_data(parser)
    parser.add_argument("--only", nargs="*", default=SOURCES, choices=SOURCES)
    parser.add_argument("--bank", type=Path, help="folder of timm's graphs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tables = read_op_tables(options.data, tuple(options.only))
    with Console(stderr=True).status("fitting without each die in turn"):
        scores = unseen_dies(tables.rows)
    vision = unseen_families(options.data, options.bank) if options.bank else []
    if options.json:
        plain = {
            "scores": [asdict(score) for score in scores],
            "vision": [asdict(score) for score in vision],
            "refused": dict(tables.refused),
        }
        print(json.dumps(plain))
        return
    table = Table(box=None, header_style="bold")
    for name in ("family", "die left out", "source"):
        table.add_column(name)
    for name in ("rows", "median", "mean", "p90", "bias", "roofline median", "mean", "goal"):
        table.add_column(name, justify="right")
    for score in scores:
        numbers = (score.median, score.mean, score.p90, score.bias)
        plain = (score.roofline_median, score.roofline_mean)
        table.add_row(
            *(score.family, score.die, score.source, f"{score.rows}"),
            *(f"{100 * value:.1f} %" for value in (*numbers, *plain)),
            "reached" if score.reached else "missed",
        )
    console = Console(width=max(Console().width, 118))
    console.print(table)
    for score in vision:
        console.print(
            f"timm's steps, {score.layout}, {score.rows} rows, family left out: "
            f"median {100 * score.median:.1f} %, p90 {100 * score.p90:.1f} %, "
            f"bias {100 * score.bias:.1f} %"
        )
    for reason, count in tables.refused.most_common():
        console.print(f"left out: {count} rows of {reason}")


if __name__ == "__main__":
    main()
