"""Judge calibration on every job and machine of tables of measured steps: is it never worse?

    python benchmarks/calibration_pairs.py TABLE.csv... [--draws N] [--k 3,5,10]

A pair is a job on a machine after k observations. Prints on which share of pairs the calibrated
median, 90th percentile and mean error are below those of the Pollux form and of the Optimus form,
where the mean is at most 1.1 times the best simple form's or within the 80 % range of a bootstrap
over draws, the largest mean error of a draw, and coverage and score of the 80 % intervals for each
source and k. Intervals know what the other jobs on the same device have shown after as many
observations of each; those of each job alone are printed too. The priors of mixture and spread
were chosen on such tables: the same is printed with the prior for each source chosen on the others.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from calibration.machine_priors import priors_of
from calibration.protocols import DRAWS, Split, k_shot
from calibration.tables import Job, read_steps
from numpy.typing import NDArray
from summary import interval_score

from estimator.calibrate.baselines import LinearScaling, OptimusRegressor, PolluxRegressor
from estimator.calibrate.intervals import COVERAGE_RATIO, SPREAD_PRIOR, Spread
from estimator.calibrate.mixture import ENGINE, MODEL, PRIOR
from estimator.calibrate.observation_files import MeasuredStep
from estimator.calibrate.regressor import StepTimeRegressor

Array = NDArray[np.float64]

RIVALS = {"linear": LinearScaling, "optimus": OptimusRegressor, "pollux": PolluxRegressor}
# How much worse than the best simple form a mean error may be, and how often a bootstrap over draws
# is repeated; its lower bound leaves out 10 % of them.
WORSE_RATIO, BOOTSTRAPS, BOUND = 1.1, 400, 0.1
# The other priors among which the leave-one-source-out judgement chooses.
WEIGHTS = (
    {**PRIOR.weights, MODEL: 4.0, ENGINE: 0.5},
    {**PRIOR.weights, MODEL: 1.0, ENGINE: 0.125},
    {**PRIOR.weights, "optimus": 0.3, "pollux": 3.0},
)
PRIORS = (
    PRIOR,
    *(dataclasses.replace(PRIOR, weights=weights) for weights in WEIGHTS),
    dataclasses.replace(PRIOR, exponent=1.0),
    dataclasses.replace(PRIOR, error_sigma=0.1),
    dataclasses.replace(PRIOR, standard_errors=0.0),
    dataclasses.replace(PRIOR, half=(3.0, 3.0, 3.0)),
    dataclasses.replace(PRIOR, standard_errors=2.0, half=(1.0, 1.0, 100.0), agreeing=0.5),
    dataclasses.replace(PRIOR, agreement=0.0),
    dataclasses.replace(PRIOR, agreement=100.0, agreeing=1.0),
)
# The other priors of the spread; the last learns nothing from other jobs.
ALONE = dataclasses.replace(SPREAD_PRIOR, jobs=1e6)
SPREADS = (
    SPREAD_PRIOR,
    dataclasses.replace(SPREAD_PRIOR, few=0.0),
    dataclasses.replace(SPREAD_PRIOR, few=1.0),
    dataclasses.replace(SPREAD_PRIOR, scatter_mean=0.1),
    dataclasses.replace(SPREAD_PRIOR, inflation_sigma=0.01),
    ALONE,
)
# The coverage that a cell should have; one of fewer rows than these may miss it by chance.
LEAST_COVERAGE, MOST_COVERAGE, FEW_ROWS = 0.75, 0.9, 200
MEDIAN, P90, MEAN = range(3)


class Draw(NamedTuple):
    """The rows of one draw that were not observed: errors by method, with intervals of ours.

    `errors` has (median, 90th percentile, mean) of each rival, and of ours under each prior;
    `intervals` has (low, high) of each row under each prior of the spread.
    """

    source: str
    label: str
    k: int
    errors: Mapping[str | int, Array]
    measured_s: Array
    predicted_s: Array
    intervals: Sequence[tuple[Array, Array]]


def draws_of(
    jobs: Iterable[Job[MeasuredStep]], source: str, ks: Sequence[int], draws: int
) -> Iterator[Draw]:
    """Every draw of every job: each method fitted to the same rows."""
    fitted: defaultdict[object, list[tuple[Job[MeasuredStep], Split, StepTimeRegressor]]]
    fitted = defaultdict(list)
    for job in jobs:
        X, y, priors = job.X(), job.y(), priors_of(job.steps[0])
        for split in k_shot(job, ks):
            if split.draw < draws and split.k is not None:
                ours = StepTimeRegressor(priors=priors).fit(X[split.train], y[split.train])
                fitted[job.gpu, split.k, split.draw].append((job, split, ours))
    for alike in fitted.values():
        mixtures = [ours.mixture_ for _, _, ours in alike]
        spreads = [
            Spread(each.left_out.log_ratio, each.left_out.variance, len(each.rows_)).posterior
            for each in mixtures
        ]
        for place, (job, split, ours) in enumerate(alike):
            ours.peers = spreads[:place] + spreads[place + 1 :]
            yield _draw(job, source, split, ours)


def _draw(job: Job[MeasuredStep], source: str, split: Split, ours: StepTimeRegressor) -> Draw:
    X, y = job.X(), job.y()
    seen, times, rows, measured_s = X[split.train], y[split.train], X[split.test], y[split.test]
    intervals = []
    for spread_prior in SPREADS:
        with_prior = copy.copy(ours)
        with_prior.spread_prior = spread_prior
        intervals.append(with_prior.predict_interval(rows))
    predicted_s = ours.predict(rows)
    errors: dict[str | int, Array] = {
        name: _errors(form().fit(seen, times).predict(rows), measured_s)
        for name, form in RIVALS.items()
    }
    for place, prior in enumerate(PRIORS):
        ours.mixture_.prior_ = prior
        ours.mixture_.weights_ = ours.mixture_.posterior_weights(prior)
        errors[place] = _errors(ours.predict(rows), measured_s)
    return Draw(source, job.label, split.k or 0, errors, measured_s, predicted_s, intervals)


def _errors(predicted_s: Array, measured_s: Array) -> Array:
    error = np.abs(predicted_s / measured_s - 1)
    return np.array([np.median(error), np.quantile(error, 0.9), error.mean()])


class Pair(NamedTuple):
    """A job after k observations, judged over its draws."""

    below_pollux: bool
    below_optimus: bool
    is_near_best: bool
    worst_draw: float
    ours: Array
    best_mean: float


def judged(draws: Sequence[Draw], prior: int) -> Pair:
    """Our errors under a prior against those of the simple forms, means over draws."""
    errors = {name: np.array([draw.errors[name] for draw in draws]) for name in (*RIVALS, prior)}
    means = {name: values.mean(axis=0) for name, values in errors.items()}
    ours = means[prior]
    best = min(RIVALS, key=lambda name: float(means[name][MEAN]))
    worse = errors[prior][:, MEAN] - WORSE_RATIO * errors[best][:, MEAN]
    rng = np.random.default_rng(0)
    resampled = rng.choice(worse, (BOOTSTRAPS, len(worse))).mean(axis=1)
    return Pair(
        below_pollux=bool((ours < means["pollux"]).all()),
        below_optimus=bool((ours < means["optimus"]).all()),
        is_near_best=bool(worse.mean() <= 0 or np.quantile(resampled, BOUND) <= 0),
        worst_draw=float(errors[prior][:, MEAN].max()),
        ours=ours,
        best_mean=float(means[best][MEAN]),
    )


def chosen_without(source: str, pairs: Mapping[tuple[str, str, int], Sequence[Draw]]) -> int:
    """The prior with the least mean error beside the best simple form's, on all other sources."""
    others = [draws for (of, _, _), draws in pairs.items() if of != source]
    costs = []
    for prior in range(len(PRIORS)):
        found = [judged(draws, prior) for draws in others]
        costs.append(np.mean([np.log((p.ours[MEAN] + 1e-3) / (p.best_mean + 1e-3)) for p in found]))
    return int(np.argmin(costs))


def report(pairs: Mapping[tuple[str, str, int], Sequence[Draw]]) -> Iterator[str]:
    """The figures in lines, of the shipped prior and of each source's own."""
    sources = list(dict.fromkeys(source for source, _, _ in pairs))
    left_out = {source: chosen_without(source, pairs) for source in sources}
    for title, priors in (
        ("the shipped prior of the mixture", dict.fromkeys(sources, 0)),
        ("the prior for each source chosen on the others", left_out),
    ):
        found = {key: judged(draws, priors[key[0]]) for key, draws in pairs.items()}
        yield f"{title}:"
        yield _line("source", "k", "pairs", *COLUMNS)
        cells = sorted({(source, k) for source, _, k in found})
        for source, k in cells:
            yield _figures(
                source, k, [p for key, p in found.items() if (key[0], key[2]) == (source, k)]
            )
        yield _figures("all", None, list(found.values()))
        yield ""
    cells = cells_of(pairs)
    chosen = {source: spread_chosen_without(source, cells) for source in sources}
    for title, spreads in (
        ("80 % intervals", dict.fromkeys(sources, 0)),
        ("80 % intervals of each job alone", dict.fromkeys(sources, SPREADS.index(ALONE))),
        ("80 % intervals, the prior of the spread for each source chosen on the others", chosen),
    ):
        yield f"{title}:"
        yield from interval_report(cells, spreads)
        yield ""


Cells = Mapping[tuple[str, int], Sequence[Draw]]


def cells_of(pairs: Mapping[tuple[str, str, int], Sequence[Draw]]) -> Cells:
    """The draws of each source and k."""
    cells: defaultdict[tuple[str, int], list[Draw]] = defaultdict(list)
    for (source, _, k), draws in sorted(pairs.items()):
        cells[source, k] += draws
    return dict(sorted(cells.items()))


def spread_chosen_without(source: str, cells: Cells) -> int:
    """The prior of the spread whose coverage is nearest to what it should be on other sources."""
    others = [draws for (of, _), draws in cells.items() if of != source]
    found = np.array(
        [[intervals_of(draws, place)[1] for draws in others] for place in range(len(SPREADS))]
    )
    away = np.maximum(LEAST_COVERAGE - found, 0) + np.maximum(found - MOST_COVERAGE, 0)
    return int(np.argmin(away.mean(axis=1)))


def interval_report(cells: Cells, spreads: Mapping[str, int]) -> Iterator[str]:
    """Coverage and score of each cell, with the prior of the spread of each source."""
    yield _line("source", "k", "rows", "inside %", "score %", "of one width %", "less %")
    coverages, saved, sizes = [], [], []
    for (source, k), draws in cells.items():
        rows, coverage, score, constant = intervals_of(draws, spreads[source])
        coverages.append(coverage)
        sizes.append(rows)
        saved.append(1 - score / constant)
        yield _line(
            source, k, rows, *(f"{100 * x:.1f}" for x in (coverage, score, constant, saved[-1]))
        )
    inside = np.array(coverages)
    good = 100 * np.mean((inside >= LEAST_COVERAGE) & (inside <= MOST_COVERAGE))
    low, high = np.transpose([bounds_of(rows) for rows in sizes])
    as_told = 100 * np.mean((inside >= low) & (inside <= high))
    yield (
        f"{good:.0f} % of {len(inside)} cells hold 75 to 90 %, {as_told:.0f} % where cells of few "
        f"rows may be anywhere in the binomial 95 % range, the least {100 * inside.min():.1f}; "
        f"score {100 * np.mean(saved):.1f} % below one width in the mean over cells"
    )


def bounds_of(rows: int) -> tuple[float, float]:
    """The coverage that a cell of so many rows should have; of few, the binomial 95 % range."""
    from scipy.stats import binom

    if rows >= FEW_ROWS:
        return LEAST_COVERAGE, MOST_COVERAGE
    low, high = binom.interval(0.95, rows, COVERAGE_RATIO)
    return min(low / rows, LEAST_COVERAGE), max(high / rows, MOST_COVERAGE)


COLUMNS = (
    "< Pollux %",
    "< Optimus %",
    "near best %",
    "worst draw %",
    "median",
    "p90",
    "mean",
    "best",
)


def _figures(source: str, k: int | None, pairs: Sequence[Pair]) -> str:
    shares = [
        100 * np.mean([getattr(pair, name) for pair in pairs])
        for name in ("below_pollux", "below_optimus", "is_near_best")
    ]
    worst = 100 * max(pair.worst_draw for pair in pairs)
    errors = 100 * np.mean([pair.ours for pair in pairs], axis=0)
    best = 100 * np.mean([pair.best_mean for pair in pairs])
    texts = [*(f"{x:.0f}" for x in (*shares, worst)), *(f"{x:.1f}" for x in (*errors, best))]
    return _line(source, k or "all", len(pairs), *texts)


def intervals_of(draws: Iterable[Draw], spread: int) -> tuple[int, float, float, float]:
    """Rows, coverage, score over the measured time, and that of one width of the same coverage."""
    columns = zip(
        *((d.measured_s, d.predicted_s, *d.intervals[spread]) for d in draws), strict=True
    )
    measured_s, predicted_s, low_s, high_s = (np.concatenate(column) for column in columns)
    coverage = float(np.mean((low_s <= measured_s) & (measured_s <= high_s)))
    width = float(np.quantile(np.abs(measured_s / predicted_s - 1), coverage))
    constant = interval_score(
        predicted_s * max(0.0, 1 - width), predicted_s * (1 + width), measured_s
    )
    score = interval_score(low_s, high_s, measured_s)
    return len(measured_s), coverage, *(float(np.mean(x / measured_s)) for x in (score, constant))


def _line(*cells: object) -> str:
    first, *rest = (str(cell) for cell in cells)
    return f"{first:14}" + "".join(f"{cell:>15}" for cell in rest)


def main() -> None:
    """Read tables, fit and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--k", default="3,5,10")
    options = parser.parse_args()
    ks = tuple(map(int, options.k.split(",")))
    pairs: defaultdict[tuple[str, str, int], list[Draw]] = defaultdict(list)
    for path in options.tables:
        for draw in draws_of(read_steps([path]).jobs, path.stem, ks, options.draws):
            pairs[draw.source, draw.label, draw.k].append(draw)
    print("\n".join(report(pairs)))


if __name__ == "__main__":
    main()
