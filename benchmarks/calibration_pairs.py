"""Judge calibration on every job and machine of tables of measured steps: never worse (A6)?

    python benchmarks/calibration_pairs.py TABLE.csv... [--draws N] [--k 3,5,10]

A pair is a job on a machine after k observations. Prints on which share of pairs the calibrated
median, 90th percentile and mean error are below those of the Pollux form and of the Optimus form,
where the mean is at most 1.1 times the best simple form's or within the 80 % range of a bootstrap
over draws, the largest mean error of a draw, and coverage and score of the 80 % intervals for each
source and k. The mixture's prior was chosen on such tables: the same is printed with the prior for
each source chosen on the others alone.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from estimator.accuracy import interval_score
from estimator.calibrate.baselines import LinearScaling, OptimusRegressor, PolluxRegressor
from estimator.calibrate.machine_priors import priors_of
from estimator.calibrate.mixture import ENGINE, MODEL, PRIOR
from estimator.calibrate.protocols import DRAWS, k_shot
from estimator.calibrate.step_time_regressor import StepTimeRegressor
from estimator.calibrate.tables import Job, MeasuredStep, read_steps

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
    dataclasses.replace(PRIOR, agreement=0.0),
    dataclasses.replace(PRIOR, agreement=100.0, agreeing=1.0),
)
MEDIAN, P90, MEAN = range(3)


class Draw(NamedTuple):
    """The rows of one draw that were not observed: errors by method, with intervals of ours.

    `errors` has (median, 90th percentile, mean) of each rival, and of ours under each prior.
    """

    source: str
    label: str
    k: int
    errors: Mapping[str | int, Array]
    measured_s: Array
    predicted_s: Array
    low_s: Array
    high_s: Array


def draws_of(job: Job[MeasuredStep], source: str, ks: Sequence[int], draws: int) -> Iterator[Draw]:
    """Every draw of a job: each method fitted to the same rows."""
    X, y, priors = job.X(), job.y(), priors_of(job.steps[0])
    for split in k_shot(job, ks):
        if split.draw >= draws or split.k is None:
            continue
        seen, times, rows, measured_s = X[split.train], y[split.train], X[split.test], y[split.test]
        ours = StepTimeRegressor(priors=priors).fit(seen, times)
        low_s, high_s = ours.predict_interval(rows)
        predicted_s = ours.predict(rows)
        errors: dict[str | int, Array] = {
            name: _errors(form().fit(seen, times).predict(rows), measured_s)
            for name, form in RIVALS.items()
        }
        for place, prior in enumerate(PRIORS):
            ours.mixture_.prior = prior
            ours.mixture_.weights_ = ours.mixture_.posterior_weights(prior)
            errors[place] = _errors(ours.predict(rows), measured_s)
        yield Draw(source, job.label, split.k, errors, measured_s, predicted_s, low_s, high_s)


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
    yield "80 % intervals:"
    yield _line("source", "k", "rows", "inside %", "score %", "of one width %", "less %")
    coverages, saved = [], []
    for source, k in sorted({(source, k) for source, _, k in pairs}):
        of_cell = [
            d for key, draws in pairs.items() if (key[0], key[2]) == (source, k) for d in draws
        ]
        rows, coverage, score, constant = intervals_of(of_cell)
        coverages.append(coverage)
        saved.append(1 - score / constant)
        yield _line(
            source, k, rows, *(f"{100 * x:.1f}" for x in (coverage, score, constant, saved[-1]))
        )
    inside = np.array(coverages)
    good, least = 100 * np.mean((inside >= 0.75) & (inside <= 0.9)), 100 * inside.min()
    yield (
        f"{good:.0f} % of {len(inside)} cells hold 75 to 90 %, the least {least:.1f}; "
        f"score {100 * np.mean(saved):.1f} % below one width in the mean over cells"
    )


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
        for job in read_steps([path]).jobs:
            for draw in draws_of(job, path.stem, ks, options.draws):
                pairs[draw.source, draw.label, draw.k].append(draw)
    print("\n".join(report(pairs)))


if __name__ == "__main__":
    main()
