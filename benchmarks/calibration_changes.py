"""Judge how calibration follows machines that become slower or faster.

A job follows a formula that is not the calibrator's, with 3 % of noise, and is observed so many
times, on one allocation or on several. Then all of its steps take 1.3 or 1.5 times as long, or 0.6
times, or their synchronisation twice as long; or they change twice, or back again, or little by
little. Printed are the mean error of the calibrated answer on all allocations (or the one) after
some new steps, the errors without calibration and after a fresh fit to so many steps of an
unchanged machine, and the share of answers within 10 % or whose interval holds the truth; then how
far one step in a steady cluster that takes three times as long moves the answer most moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from options import Options

from estimator.calibrate.performance_model import ENGINE_PRIORS, EngineTimes
from estimator.calibrate.regressor import StepTimeRegressor

Array = NDArray[np.float64]

SEEDS, NOISE, AFTER, DAY_S = 5, 0.03, (1, 3, 10, 20), 86400.0
# Placements as ranks, nodes and most devices on a node, and batches of a rank.
PLACEMENTS = ((1, 1, 1), (2, 1, 2), (4, 1, 4), (8, 1, 8), (8, 2, 4), (16, 2, 8), (32, 4, 8))
BATCHES = (8, 16, 32)
ROWS = np.array([(r, n, b, 1, m) for (r, n, m), b in product(PLACEMENTS, BATCHES)], dtype=float)
SAME = np.array([(16, 2, 16, 1, 8)], dtype=float)


def parts_s(rows: Array) -> tuple[Array, Array]:
    """Compute and exposed synchronisation of a true step: no form that any of the fits has."""
    ranks, nodes, batch = rows[:, 0], rows[:, 1], rows[:, 2]
    compute_s = 0.012 + 0.0061 * batch**0.94 + 0.003 * np.log(rows[:, 4])
    ring = (1 - 1 / ranks) * np.where(nodes > 1, 0.11, 0.025) * (1 + 0.06 * np.log2(nodes))
    return compute_s, ring


def engine_times(rows: Array) -> EngineTimes:
    """What an engine says that is off by 15 % in compute and by a third in communication."""
    compute_s, sync_s = parts_s(rows)
    compute_s, sync_s = compute_s / 1.15, sync_s * 0.75
    return EngineTimes(compute_s=compute_s, sync_s=sync_s, step_s=compute_s + sync_s)


# How compute and synchronisation stand at step i of those after the change, of n.
Level = Callable[[Array], tuple[Array, Array]]
CASES: dict[str, Level] = {
    "x1": lambda i: (1.0 + 0 * i, 1.0 + 0 * i),
    "x1.3": lambda i: (1.3 + 0 * i, 1.3 + 0 * i),
    "x1.5": lambda i: (1.5 + 0 * i, 1.5 + 0 * i),
    "x0.6": lambda i: (0.6 + 0 * i, 0.6 + 0 * i),
    "network x2": lambda i: (1.0 + 0 * i, 2.0 + 0 * i),
    "two: x1.4, x0.8": lambda i: (np.where(i < -10, 1.4, 0.8),) * 2,
    "there and back": lambda i: (np.where(i < -5, 1.5, 1.0),) * 2,
    "ramp to x1.4": lambda i: (np.clip(1 + 0.02 * (i + 20), 1, 1.4),) * 2,
}
# Steps before the last level within which a case has changed already.
_EARLIER = {"two: x1.4, x0.8": 20, "there and back": 15, "ramp to x1.4": 20}


def true_s(rows: Array, level: tuple[Array, Array]) -> Array:
    compute_s, sync_s = parts_s(rows)
    return np.asarray(compute_s * level[0] + sync_s * level[1])


class Answer(NamedTuple):
    """Of one case, seed and number of new steps: errors, and the share of good answers."""

    error: float
    cold_error: float
    fresh_error: float
    good: float
    half_width: float


def answers(case: str, before: int, mixed: bool, seed: int) -> Iterator[Answer]:
    """One for each number of new steps."""
    rng, pool = np.random.default_rng(seed), ROWS if mixed else SAME
    count = before + max(AFTER)
    place = np.arange(count) - before
    rows = pool[rng.integers(len(pool), size=count)]
    old, ones = (np.ones(count), np.ones(count)), np.ones(len(pool))
    earlier = _EARLIER.get(case, 0)
    changed = CASES[case](np.where(place < 0, place, 0.0))
    compute, network = (np.where(place >= -earlier, each, 1.0) for each in changed)
    noise = np.exp(rng.normal(0, NOISE, count))
    times_s, steady_s = true_s(rows, (compute, network)) * noise, true_s(rows, old) * noise
    wanted_s = true_s(pool, (compute[-1] * ones, network[-1] * ones))
    engine_s = engine_times(pool).step_s
    assert engine_s is not None
    for after in AFTER:
        seen, new = slice(before + after), slice(before, before + after)
        fitted = StepTimeRegressor(priors=ENGINE_PRIORS).fit(
            rows[seen], times_s[seen], engine_times=engine_times(rows[seen]),
            at=DAY_S * np.arange(count)[seen],
        )  # fmt: skip
        fresh = StepTimeRegressor(priors=ENGINE_PRIORS).fit(
            rows[new], steady_s[new], engine_times=engine_times(rows[new])
        )
        found = fitted.prediction(pool, engine_times=engine_times(pool))
        off = np.abs(np.expm1(found.log_step - np.log(wanted_s)))
        inside = np.abs(found.log_step - np.log(wanted_s)) <= found.half_width
        unchanged_s = true_s(pool, (ones, ones))
        fresh_s = fresh.predict(pool, engine_times=engine_times(pool))
        yield Answer(
            error=float(off.mean()),
            cold_error=float(np.abs(engine_s / wanted_s - 1).mean()),
            fresh_error=float(np.abs(fresh_s / unchanged_s - 1).mean()),
            good=float((inside | (off <= 0.1)).mean()),
            half_width=float(found.half_width.mean()),
        )


def moved_by_an_outlier(count: int, mixed: bool, seed: int) -> float:
    """How far one step of so many that takes three times as long moves the answer most moved."""
    rng, pool = np.random.default_rng(seed), ROWS if mixed else SAME
    rows, wrong = pool[rng.integers(len(pool), size=count)], int(rng.integers(count))
    times_s = true_s(rows, (np.ones(count), np.ones(count))) * np.exp(rng.normal(0, NOISE, count))
    times_s[wrong] *= 3
    others = np.delete(np.arange(count), wrong)
    with_it, without = (
        StepTimeRegressor(priors=ENGINE_PRIORS)
        .fit(rows[seen], times_s[seen], engine_times=engine_times(rows[seen]), at=DAY_S * seen)
        .predict(pool, engine_times=engine_times(pool))
        for seen in (np.arange(count), others)
    )
    return float(np.abs(with_it / without - 1).max())


def run(options: Options) -> Mapping[str, Any]:
    """A line for each case; a quick run has one seed."""
    seeds = range(1 if options.quick else SEEDS)
    lines = ["case | before | allocations | new | error | uncalibrated | fresh fit | good | ± %"]
    for case, before, mixed in product(filter(options.takes, CASES), (50, 5), (False, True)):
        if before <= _EARLIER.get(case, 0):
            continue
        found = [list(answers(case, before, mixed, seed)) for seed in seeds]
        for after, *each in zip(AFTER, *found, strict=True):
            means = (f"{100 * mean:.1f}" for mean in np.mean(each, axis=0))
            what = case, before, "mixed" if mixed else "same", after, *means
            lines.append(" | ".join(map(str, what)))
    if options.only:
        return {"report": lines if lines[1:] else []}
    lines.append("one step x3 | steps | allocations | worst move of any answer")
    for count, mixed in product((6, 20, 50), (False, True)):
        worst = max(moved_by_an_outlier(count, mixed, seed) for seed in seeds)
        lines.append(f"one step x3 | {count} | {'mixed' if mixed else 'same'} | {100 * worst:.1f}")
    return {"report": lines}
