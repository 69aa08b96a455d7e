"""Judge calibration on every job and machine of tables of measured steps: is it never worse?

A pair is a job on a machine after k observations. Prints on which share of pairs the calibrated
median, 90th percentile and mean error are below those of the Pollux form and of the Optimus form,
where the mean is at most 1.1 times the best simple form's or within the 80 % range of a bootstrap
over draws, the largest mean error of a draw, and coverage and score of the 80 % intervals for each
source and k. Intervals know what the other jobs on the same device have shown after as many
observations of each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from calibration.machine_priors import priors_of
from calibration.protocols import Split, k_shot
from calibration.rivals import FORMS
from calibration.tables import Job, read_steps
from numpy.typing import NDArray
from options import Options
from summary import format_table, interval_score

from estimator.calibrate.intervals import COVERAGE_RATIO, Spread
from estimator.calibrate.regressor import StepTimeRegressor

Array = NDArray[np.float64]

TABLES, KS = ("gavel", "pollux_t4", "dlperf"), (3, 5, 10)
OURS = "calibrated"
RIVALS = {name: FORMS[name] for name in ("linear", "optimus", "pollux")}
# How much worse than the best simple form a mean error may be, and how often a bootstrap over draws
# is repeated; its lower bound leaves out 10 % of them.
WORSE_RATIO, BOOTSTRAPS, BOUND = 1.1, 400, 0.1
# The coverage that a cell should have; one of fewer rows than these may miss it by chance.
LEAST_COVERAGE, MOST_COVERAGE, FEW_ROWS = 0.75, 0.9, 200
MEDIAN, P90, MEAN = range(3)


class Draw(NamedTuple):
    """The rows of one draw that were not observed: errors by method, with intervals of ours.

    `errors` has (median, 90th percentile, mean) of each rival and of ours.
    """

    source: str
    label: str
    k: int
    errors: Mapping[str, Array]
    measured_s: Array
    predicted_s: Array
    low_s: Array
    high_s: Array


def draws_of(jobs: Iterable[Job], source: str, ks: Sequence[int]) -> Iterator[Draw]:
    """Every draw of every job: each method fitted to the same rows."""
    fitted: defaultdict[object, list[tuple[Job, Split, StepTimeRegressor]]]
    fitted = defaultdict(list)
    for job in jobs:
        X, y, priors = job.X(), job.y(), priors_of(job.steps[0])
        for split in k_shot(job, ks):
            ours = StepTimeRegressor(priors=priors).fit(X[split.train], y[split.train])
            fitted[job.gpu, split.k, split.draw].append((job, split, ours))
    for alike in fitted.values():
        mixtures = [ours.mixture_ for _, _, ours in alike]
        spreads = [
            Spread(each.left_out.log_ratio, each.left_out.variance).posterior for each in mixtures
        ]
        for place, (job, split, ours) in enumerate(alike):
            ours.peers = spreads[:place] + spreads[place + 1 :]
            yield _draw(job, source, split, ours)


def _draw(job: Job, source: str, split: Split, ours: StepTimeRegressor) -> Draw:
    X, y = job.X(), job.y()
    seen, times, rows, measured_s = X[split.train], y[split.train], X[split.test], y[split.test]
    predicted_s = ours.predict(rows)
    errors = {
        name: _errors(form().fit(seen, times).predict(rows), measured_s)
        for name, form in RIVALS.items()
    }
    errors[OURS] = _errors(predicted_s, measured_s)
    interval = ours.predict_interval(rows)
    return Draw(source, job.label, split.k or 0, errors, measured_s, predicted_s, *interval)


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


def judged(draws: Sequence[Draw]) -> Pair:
    """Our errors against those of the simple forms, means over draws."""
    errors = {name: np.array([draw.errors[name] for draw in draws]) for name in (*RIVALS, OURS)}
    means = {name: values.mean(axis=0) for name, values in errors.items()}
    ours = means[OURS]
    best = min(RIVALS, key=lambda name: float(means[name][MEAN]))
    worse = errors[OURS][:, MEAN] - WORSE_RATIO * errors[best][:, MEAN]
    rng = np.random.default_rng(0)
    resampled = rng.choice(worse, (BOOTSTRAPS, len(worse))).mean(axis=1)
    return Pair(
        below_pollux=bool((ours < means["pollux"]).all()),
        below_optimus=bool((ours < means["optimus"]).all()),
        is_near_best=bool(worse.mean() <= 0 or np.quantile(resampled, BOUND) <= 0),
        worst_draw=float(errors[OURS][:, MEAN].max()),
        ours=ours,
        best_mean=float(means[best][MEAN]),
    )


Pairs = Mapping[tuple[str, str, int], Sequence[Draw]]


def report(pairs: Pairs) -> Iterator[str]:
    """The figures in lines: errors of each source and k, then intervals."""
    judged_pairs = {key: judged(draws) for key, draws in pairs.items()}
    lines = [["source", "k", "pairs", *COLUMNS]]
    for source, k in sorted({(source, k) for source, _, k in pairs}):
        of_cell = [pair for key, pair in judged_pairs.items() if (key[0], key[2]) == (source, k)]
        lines.append(_figures(source, str(k), of_cell))
    yield format_table([*lines, _figures("all", "all", list(judged_pairs.values()))])
    yield "\n80 % intervals:"
    yield from interval_report(pairs)


def interval_report(pairs: Pairs) -> Iterator[str]:
    """Coverage and score of each source and k."""
    cells: defaultdict[tuple[str, int], list[Draw]] = defaultdict(list)
    for (source, _, k), draws in sorted(pairs.items()):
        cells[source, k] += draws
    lines = [["source", "k", "rows", "inside %", "score %", "of one width %", "less %"]]
    found = []
    for (source, k), draws in sorted(cells.items()):
        rows, coverage, score, constant = intervals_of(draws)
        found.append((coverage, *bounds_of(rows), 1 - score / constant))
        ratios = (coverage, score, constant, 1 - score / constant)
        lines.append([source, str(k), str(rows), *(f"{100 * x:.1f}" for x in ratios)])
    yield format_table(lines)
    inside, low, high, saved = np.transpose(found)
    good = 100 * np.mean((inside >= LEAST_COVERAGE) & (inside <= MOST_COVERAGE))
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
    *("< Pollux %", "< Optimus %", "near best %", "worst draw %"),
    *("median", "p90", "mean", "best"),
)


def _figures(source: str, k: str, pairs: Sequence[Pair]) -> list[str]:
    shares = [
        100 * np.mean([getattr(pair, name) for pair in pairs])
        for name in ("below_pollux", "below_optimus", "is_near_best")
    ]
    worst = 100 * max(pair.worst_draw for pair in pairs)
    errors = 100 * np.mean([pair.ours for pair in pairs], axis=0)
    best = 100 * np.mean([pair.best_mean for pair in pairs])
    texts = [*(f"{x:.0f}" for x in (*shares, worst)), *(f"{x:.1f}" for x in (*errors, best))]
    return [source, k, str(len(pairs)), *texts]


def intervals_of(draws: Iterable[Draw]) -> tuple[int, float, float, float]:
    """Rows, coverage, score over the measured time, and that of one width of the same coverage."""
    columns = zip(*((d.measured_s, d.predicted_s, d.low_s, d.high_s) for d in draws), strict=True)
    measured_s, predicted_s, low_s, high_s = (np.concatenate(column) for column in columns)
    coverage = float(np.mean((low_s <= measured_s) & (measured_s <= high_s)))
    width = float(np.quantile(np.abs(measured_s / predicted_s - 1), coverage))
    constant = interval_score(
        predicted_s * max(0.0, 1 - width), predicted_s * (1 + width), measured_s
    )
    score = interval_score(low_s, high_s, measured_s)
    return len(measured_s), coverage, *(float(np.mean(x / measured_s)) for x in (score, constant))


def run(options: Options) -> Mapping[str, Any]:
    """Fit and judge every pair of the tables."""
    pairs: defaultdict[tuple[str, str, int], list[Draw]] = defaultdict(list)
    for name in filter(options.takes, TABLES):
        for draw in draws_of(read_steps([options.data / f"{name}.csv"]).jobs, name, KS):
            pairs[draw.source, draw.label, draw.k].append(draw)
    return {"report": list(report(pairs)) if pairs else []}
